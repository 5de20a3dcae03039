"""Linear layers with weights of 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outrider.engine.cpu.int8 import PASS_ROWS, Int8Linear, quantize_linears


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, PASS_ROWS, 2 * PASS_ROWS + 3])
def test_products_are_near_the_exact_ones(dtype: torch.dtype, bias: bool, rows: int) -> None:
    """Within a hundredth or two, for any number of rows, in the dtype of the rows."""
    torch.manual_seed(1)
    exact = nn.Linear(96, 50, bias=bias, dtype=dtype)
    made = Int8Linear(exact.weight, exact.bias)
    x = torch.randn(rows, 96, dtype=dtype)
    with torch.inference_mode():
        found, expected = made(x), exact(x)
    assert (found.dtype, found.shape) == (dtype, (rows, 50))
    assert _distance(found, expected) < 0.02


def test_each_row_of_a_weight_has_its_own_factor() -> None:
    """A large row takes no digits from a small one."""
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    weight[0] *= 1e4
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    assert _distance(Int8Linear(weight, None)(x)[:, 1], (x @ weight.T)[:, 1]) < 0.05


def test_a_row_of_zeros_stays_zero() -> None:
    """It has no largest number to divide by."""
    assert Int8Linear(torch.zeros(3, 32), None)(torch.ones(1, 32)).tolist() == [[0.0, 0.0, 0.0]]


def test_rows_may_have_several_dimensions() -> None:
    """As those of the layers that it replaces."""
    assert Int8Linear(torch.randn(5, 32), None)(torch.randn(2, 3, 32)).shape == (2, 3, 5)


def test_layers_that_do_not_fit_stay() -> None:
    """The operator is wrong for other widths; the rest takes half the memory of bfloat16."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 20), nn.Linear(20, 8)).bfloat16()
    before = sum(layer.weight.nbytes for layer in model[:2])
    assert quantize_linears(model) == 2
    assert [type(layer) for layer in model] == [Int8Linear, Int8Linear, nn.Linear]
    assert sum(layer.nbytes for layer in model[:2]) == before / 2
