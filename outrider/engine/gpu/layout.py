"""The layout of the one buffer that a step sends to the device.

All of it is int64, so that positions, slots and mask words share it. A graph reads it at fixed places, which
depend only on its capacity. What varies in size is in the tail, which tiles and rows point into.

    counts      the number of items, the number of moves
    per token   token id, position, slot to write, own entry, place of its mask or path, tile, row wanted
    moves       entries to copy before anything is written, from and to
    tiles       see TILE_FIELDS
    items       see ITEM_FIELDS
    tail        page tables, ancestor masks (or paths: `plan.PlanSettings.ordered`), depths

Padding tokens are written to a slot that nothing reads, belong to no tile, and get zeros from attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

TILE_FIELDS = 9
"""Fields of a tile: first token, number of tokens, committed length, place of the pages, place of the depths
(0: a chain), lowest position, first item, number of items, number of entries that all its tokens see."""
ITEM_FIELDS = 4
"""Fields of an item: tile, first entry, end, entries of a split (only for `kernels.ordered_attention`)."""
COUNTS = 16
"""Words for the counts; all sections are aligned to this many words."""
PER_TOKEN = ("tokens", "positions", "slots", "own", "masks", "tile_of", "wanted")
MOVES = 64
"""Most entries that a step can move before it begins."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a buffer has room for: that of a graph, or exactly what a step without a graph needs."""

    tokens: int
    tiles: int
    items: int


@dataclass(frozen=True)
class BufferLayout:
    """Places in the buffer, in int64 words."""

    capacity: Capacity

    def at(self, name: str) -> int:
        """Return where a per-token section begins."""
        return self._sections[name]

    @cached_property
    def _sections(self) -> dict[str, int]:
        size = _aligned(self.capacity.tokens)
        return {name: COUNTS + index * size for index, name in enumerate(PER_TOKEN)}

    @cached_property
    def moves_at(self) -> int:
        """Where the moves begin: sources [MOVES], then destinations [MOVES]."""
        return COUNTS + len(PER_TOKEN) * _aligned(self.capacity.tokens)

    @cached_property
    def tiles_at(self) -> int:
        """Where the tiles [tiles, TILE_FIELDS] begin."""
        return self.moves_at + 2 * MOVES

    @cached_property
    def items_at(self) -> int:
        """Where the items [items, ITEM_FIELDS] begin."""
        return self.tiles_at + _aligned(self.capacity.tiles * TILE_FIELDS)

    @cached_property
    def tail_at(self) -> int:
        """Where the tail begins, which varies in size."""
        return self.items_at + _aligned(self.capacity.items * ITEM_FIELDS)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step's buffer on the device, and its sections."""

    buffer: Tensor
    """[words] int64."""
    layout: BufferLayout
    rows: int
    """W, the number of wanted rows including padding."""
    partial: Tensor
    """float32, where the items of a tile write their sums: [items, H, BLOCK_M, V] of the layer at work."""
    statistics: Tensor
    """float32, their largest scores and sums of weights: [2, items, H, BLOCK_M]."""

    @classmethod
    def with_room(
        cls, buffer: Tensor, layout: BufferLayout, rows: int, partial: int, statistics: int
    ) -> DeviceStep:
        """Return a step with memory for `partial` and `statistics` numbers in the fields of these names."""
        room = (
            torch.empty(numbers, dtype=torch.float32, device=buffer.device)
            for numbers in (partial, statistics)
        )
        return cls(buffer, layout, rows, *room)

    def section(self, name: str) -> Tensor:
        """Return a per-token section [tokens]."""
        start = self.layout.at(name)
        return self.buffer[start : start + self.layout.capacity.tokens]

    @property
    def tokens(self) -> Tensor:
        """[1, N] int64, padding at the end."""
        return self.section("tokens")[None]

    @property
    def positions(self) -> Tensor:
        """[1, N] int64."""
        return self.section("positions")[None]

    @property
    def wanted(self) -> Tensor:
        """[W] int64, packed positions whose logits are wanted, padding at the end."""
        return self.section("wanted")[: self.rows]


def _aligned(words: int) -> int:
    return -(-words // COUNTS) * COUNTS
