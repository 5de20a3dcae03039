"""Linear layers with codes alone, computed by torch."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from outrider.engine.gpu import coded_linear
from outrider.engine.gpu.coded_linear import CodedLinear, SideBySide, joined_layers, without_codes
from outrider.engine.quantization.planes import rounded_in_planes
from outrider.engine.quantization.rounding import rounded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(out: int = 6, *, bits: int = 8, bias: bool = False, seed: int = 0) -> CodedLinear:
    """[out, 40], rounded."""
    weight = rounded_in_planes(random(out, 40, seed=seed), bits, CPU)
    return CodedLinear(weight, random(out, seed=seed + 1) if bias else None, torch.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_torch_s_with_the_numbers(bias: bool) -> None:
    """For any leading axes; the numbers are made each time and not kept."""
    made, x = layer(bias=bias), random(2, 3, 40)
    weight = rounded(random(6, 40), 8).values()
    assert torch.equal(made.weight, weight)
    assert torch.equal(made(x), linear(x, weight, made.bias))
    assert sum(each.nbytes for each in made.parameters()) < weight.nbytes


def test_its_codes_move_with_the_model_and_count_as_weights() -> None:
    """As those of any layer, and nothing trains them."""
    network = nn.Sequential(layer(bias=True)).to("meta")
    assert {name for name, _ in network.named_parameters()} == {"0.words", "0.scales", "0.bias"}
    assert all(each.is_meta and not each.requires_grad for each in network.parameters())


def test_layers_of_one_kind_become_one_and_share_its_memory() -> None:
    """Each still computes what it did; a part without a bias has none in the whole."""
    parts = [layer(bias=True), layer(4, seed=5)]
    x = random(3, 40)
    wanted = [part(x) for part in parts]
    whole = joined_layers(parts)
    assert isinstance(whole, CodedLinear)
    torch.testing.assert_close(whole(x), torch.cat(wanted, 1))
    for part, expected in zip(parts, wanted, strict=True):
        assert torch.equal(part(x), expected)
        assert part.words.untyped_storage().data_ptr() == whole.words.untyped_storage().data_ptr()


def test_layers_of_several_kinds_lie_side_by_side() -> None:
    """Other bits, or no codes at all."""
    parts = [layer(bits=8), layer(4, bits=4), nn.Linear(40, 3)]
    x, whole = random(3, 40), joined_layers(parts)
    assert isinstance(whole, SideBySide)
    assert whole.out_features == 13
    assert torch.equal(whole(x), torch.cat([part(x) for part in parts], 1))


@pytest.mark.parametrize(
    ("dtype", "device", "lacking", "sentence"),
    [
        (torch.bfloat16, CUDA, None, None),
        (torch.float16, CUDA, None, None),
        (torch.float32, CUDA, None, r"take 16 bits, and this model is torch.float32; set dtype to bfloat16"),
        (torch.bfloat16, CUDA, "Triton is not installed", r"Triton is not installed; .*set device to cpu"),
        (torch.bfloat16, torch.device("mps"), None, r"no kernels for mps; set device to cpu or cuda"),
    ],
)
def test_what_codes_take_of_a_device(
    dtype: torch.dtype,
    device: torch.device,
    lacking: str | None,
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 bits and Triton; else a clause says what to change."""
    monkeypatch.setattr(coded_linear, "missing", lambda place: lacking)
    reason = without_codes(dtype, device)
    if sentence is None:
        assert reason is None
    else:
        assert re.search(sentence, reason or "")
