"""The product of linear layers in one order, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.gpu import ordered_linear
from outrider.engine.gpu.ordered_linear import BLOCK_ROWS, OrderedLinear

SHAPES = [(64, 96), (200, 33), (65, 130), (16, 1)]
"""Whole tiles and cut ones."""


def layer(shape: tuple[int, int], dtype: torch.dtype, *, bias: bool) -> tuple[OrderedLinear, torch.Tensor]:
    """A layer of random weights, and rows for it."""
    generator = torch.Generator().manual_seed(0)
    numbers, columns = shape
    weight = torch.randn(columns, numbers, generator=generator).to(dtype)
    x = torch.randn(2 * BLOCK_ROWS + 3, numbers, generator=generator).to(dtype)
    return OrderedLinear(weight, torch.randn(columns, generator=generator).to(dtype) if bias else None), x


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_torch(shape, dtype, bias):
    """But for the order of additions; they are rounded once."""
    product, x = layer(shape, dtype, bias=bias)
    exact = [None if each is None else each.double() for each in (product.weight, product.bias)]
    expected = torch.nn.functional.linear(x.double(), *exact).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(product(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(monkeypatch, dtype, wide):
    """By itself, first or last of a tile, in the second tile, beside other rows."""
    monkeypatch.setattr(ordered_linear, "WIDE_FROM", 1 if wide else 1000)
    product, x = layer((200, 33), dtype, bias=True)
    expected = torch.cat([product(row[None]) for row in x])
    for first, last in ((0, 2), (5, 40), (1, 65), (3, 67), (0, len(x))):
        assert torch.equal(product(x[first:last]), expected[first:last])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(x[order]), expected[order])


def test_other_rows_than_it_is_for_are_refused():
    """The kernel would read beside them."""
    product, x = layer((64, 96), torch.float32, bias=False)
    with pytest.raises(ValueError, match="what a product takes is"):
        product(x[:, :32])
    with pytest.raises(ValueError, match="what a product takes has strides"):
        product(x[::2])
