"""Matrix products in blocks of rows."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.row_blocks import RowBlocks

FINE = RowBlocks((2, 3, 4, 5, 6, 7, 8, 16, 64, 128))


@pytest.mark.parametrize("blocks", [FINE, RowBlocks((8,)), RowBlocks((4, 8, 12, 64))])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 17, 64, 65, 300])
def test_blocks_cover_all_rows_in_known_sizes(blocks: RowBlocks, rows: int) -> None:
    """Every row is in one block, only the last block is padded, and no kernel meets another size."""
    parts = blocks.split(rows)
    assert [row for start, stop, _ in parts for row in range(start, stop)] == list(range(rows))
    assert all(size in blocks.sizes for _, _, size in parts)
    assert all(stop - start == size for start, stop, size in parts[:-1])
    assert blocks.padded(rows) == sum(size for _, _, size in parts) >= rows


def test_little_is_padded_and_few_products_are_made() -> None:
    """A pass over the weights costs more than some padding, but not more than a lot."""
    assert RowBlocks((4, 8, 64)).split(5) == ((0, 5, 8),)
    assert FINE.split(65) == ((0, 64, 64), (64, 65, 2))
    assert FINE.split(120) == ((0, 120, 128),)


@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (9, 5), (70, 5), (2, 3, 9, 5)])
def test_rows_come_back_in_order(shape: tuple[int, ...]) -> None:
    """Padding and cutting change nothing of what a kernel computes for a row."""
    rows = torch.arange(float(torch.Size(shape).numel())).view(shape)
    met: list[int] = []

    def kernel(part: torch.Tensor) -> torch.Tensor:
        met.append(part.shape[-2])
        assert part.is_contiguous()
        return part[..., :2] * 3

    torch.testing.assert_close(FINE.apply(rows, kernel), rows[..., :2] * 3, rtol=0, atol=0)
    assert set(met) <= set(FINE.sizes)
