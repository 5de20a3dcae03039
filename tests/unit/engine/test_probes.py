"""Finding the sizes of blocks at which matrix kernels agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.engine.loaded_model import Geometry
from outrider.engine.loader import load_model
from outrider.engine.packed_linear import PackedLinear, StreamedLinear, pack_linears, wrap_linears
from outrider.engine.probes import SAMPLE, agree, cancelling, find_arithmetic, first_agreeing
from outrider.engine.row_blocks import Kernel, RowBlocks
from outrider.errors import ModelError

GEOMETRY = Geometry(num_layers=1, query_heads=2, kv_heads=1, head_dim=16, value_dim=16)


def product(order: Callable[[int], torch.Tensor]) -> tuple[Kernel, torch.Tensor]:
    """A product whose order of additions depends on the number of rows, and rows for it."""
    rows, weight = cancelling(SAMPLE, 32, 8, torch.empty(0))

    def kernel(part: torch.Tensor) -> torch.Tensor:
        return in_order(part, weight, order(len(part)))

    return kernel, rows


def in_order(rows: torch.Tensor, weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`rows @ weight.T` added up one term after the other."""
    total = torch.zeros(len(rows), len(weight))
    for k in order.tolist():
        total += rows[:, k : k + 1].float() * weight[:, k].float()
    return total.to(rows.dtype)


FORWARD, BACKWARD = torch.arange(32), torch.arange(31, -1, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_additions_shows(dtype: torch.dtype) -> None:
    """Added up backwards, most products of the probing numbers differ, in 16 bits too."""
    rows, weight = cancelling(SAMPLE, 32, 8, torch.empty(0, dtype=dtype))
    forward, backward = in_order(rows, weight, FORWARD), in_order(rows, weight, BACKWARD)
    assert torch.ne(forward, backward).float().mean() > 0.5


@pytest.mark.parametrize("least", [1, 2, 4, 8, 16])
def test_the_least_size_that_agrees_is_found(least: int) -> None:
    """Kernels for fewer rows add up in another order."""
    blocks = first_agreeing([product(lambda rows: FORWARD if rows >= least else BACKWARD)])
    assert blocks is not None
    assert blocks.sizes[0] == least
    assert len(blocks.sizes) > 1


def test_one_size_is_left_when_all_differ() -> None:
    """With a kernel of its own for every number of rows, all blocks are of one size."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(32, generator=generator) for _ in range(513)]
    assert first_agreeing([product(orders.__getitem__)]) == RowBlocks((16,))


def test_rows_that_depend_on_their_place_are_found() -> None:
    """A kernel that treats the last row of a block in its own way cannot be used at all."""

    def kernel(rows: torch.Tensor) -> torch.Tensor:
        results = rows.sum(-1, keepdim=True)
        results[-1] = rows[-1].flip(0).sum()
        return results

    rows = torch.randn(SAMPLE, 512, generator=torch.Generator().manual_seed(0)) * 1e4
    assert not agree(RowBlocks((4, 8)), kernel, rows)
    assert agree(RowBlocks((4, 8)), lambda part: part * 2, rows)


def test_layers_keep_to_what_was_found() -> None:
    """Packed or not, a layer gives a row the same bits alone and among others; others stay exact."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4096, 48, dtype=torch.bfloat16), nn.Linear(48, 24, dtype=torch.float64))
    x = torch.randn(70, 4096, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = network[0](x)
        assert (pack_linears(network), wrap_linears(network)) == (1, 1)
        assert isinstance(network[0], PackedLinear | StreamedLinear)
        arithmetic = find_arithmetic(network, "Tiny", GEOMETRY)
        together = network[0](x)
        torch.testing.assert_close(together, expected)
        for start, stop in ((0, 1), (5, 6), (7, 24), (3, 69)):
            assert torch.equal(network[0](x[start:stop]), together[start:stop])
    assert arithmetic.unit == 4
    assert [arithmetic.padded(tokens) % 4 for tokens in (0, 1, 5, 130)] == [0] * 4


def test_nothing_consistent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says that it is about the setting, and which part fails."""
    network = nn.Sequential(nn.Linear(16, 16))
    wrap_linears(network)
    monkeypatch.setattr("outrider.engine.probes.agree", lambda *_: False)
    with pytest.raises(ModelError, match="deterministic: the linear layers of Tiny give a row other bits"):
        find_arithmetic(network, "Tiny", GEOMETRY)


def test_experts_are_refused(folder_of: Callable[[str], Path]) -> None:
    """Their products have as many rows as the router says."""
    with pytest.raises(
        ModelError, match=r"deterministic: not offered for GptOss\w+, whose \S+ multiplies by"
    ):
        load_model(str(folder_of("gpt_oss")), dtype="float32", device="cpu", threads=1, deterministic=True)
