"""Matrix products in blocks of rows whose kernels agree.

A kernel chosen for one row may add up in another order than one chosen for eight. `RowBlocks` holds the
sizes at which all kernels were seen to give a row the same bits, wherever it stands and whatever the other
rows are; any number of rows is computed as blocks of these sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch.nn.functional import pad

Kernel: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""[..., R, K] -> [..., R, M], one result per row."""

MOST_PADDING = 16
"""Rows that cost less than one more pass over the weights."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Sizes of blocks, ascending."""

    sizes: tuple[int, ...]

    def split(self, rows: int) -> tuple[tuple[int, int, int], ...]:
        """Blocks (start, stop, size) of `rows` rows; only the last has stop - start < size."""
        return _split(self.sizes, rows)

    def padded(self, rows: int) -> int:
        """How many rows are computed for `rows` rows."""
        return sum(size for _, _, size in self.split(rows))

    def apply(self, rows: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """`kernel` of every row of `rows` [..., R, K], in blocks."""
        count = rows.shape[-2]
        if count in self.sizes:
            return kernel(rows)
        parts: list[torch.Tensor] = []
        for start, stop, size in self.split(count):
            block = pad(rows[..., start:stop, :], (0, 0, 0, size - stop + start))
            parts.append(kernel(block.contiguous())[..., : stop - start, :])
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


@lru_cache(maxsize=4096)
def _split(sizes: tuple[int, ...], rows: int) -> tuple[tuple[int, int, int], ...]:
    """The next larger size where little is padded, else the largest that fits, and so on with the rest."""
    blocks: list[tuple[int, int, int]] = []
    start = 0
    while start < rows:
        left = rows - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        if size - left > max(MOST_PADDING, left // 4):
            size = max((size for size in sizes if size <= left), default=size)
        blocks.append((start, min(start + size, rows), size))
        start += size
    return tuple(blocks)
