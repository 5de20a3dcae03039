"""What lies between the products of a layer, by kernels in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

from outrider.engine.fused_decoder.activation import NAMES, gelu_tanh, relu_squared
from outrider.engine.fused_decoder.decoder import Gate, Norm, PlainMlp
from outrider.engine.gpu.operations import GpuOperations, _add_norm

NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
OPERATIONS = GpuOperations.__new__(GpuOperations)
"""What these need of it knows no decoder."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers around 1."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1).to(dtype)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_a_norm_that_centres_rows_is_layer_norm(dtype, width, bias, add):
    """Of the sum, which the rows become; padding of a row counts neither in its mean nor in its variance."""
    hidden, added = random(3, width, dtype=dtype), random(3, width, dtype=dtype, seed=1) if add else None
    weight, shift = random(width, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3) if bias else None
    total = hidden if added is None else hidden + added
    found = _add_norm(Norm(weight, 1e-5, centred=True, bias=shift), hidden, added)
    assert torch.equal(hidden, total)
    wanted = layer_norm(total, (width,), weight, shift, 1e-5)
    torch.testing.assert_close(found, wanted, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("activation", [silu, gelu, gelu_tanh, relu, relu_squared])
def test_activations_are_torch_s(dtype, activation):
    """Far from zero too, where tanh and exp leave the range of numbers; with a gate and without."""
    assert activation in NAMES
    x = torch.cat([torch.linspace(-12, 12, 1500), torch.tensor([-3e4, -200.0, -0.0, 200.0, 3e4, 1e15])])
    x = x.to(dtype)[None]
    plain, up = PlainMlp(torch.nn.Identity(), activation, torch.nn.Identity()), torch.nn.Identity()
    up.out_features = x.shape[1]
    for found, wanted in [
        (OPERATIONS.activation(plain)(x.clone()), activation(x.double())),
        (OPERATIONS.gate(Gate(up, activation))(x), Gate(up, activation)(x.double())),
    ]:
        torch.testing.assert_close(found.double(), wanted, rtol=NEAR[dtype], atol=1e-5)


def test_other_activations_are_left_to_torch():
    """As they are."""
    assert OPERATIONS.activation(PlainMlp(torch.nn.Identity(), torch.tanh, torch.nn.Identity())) is torch.tanh
