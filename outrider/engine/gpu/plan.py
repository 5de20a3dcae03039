"""Plans a step for the kernels and writes its buffer, without torch, in one pass over the sequences.

New tokens of a sequence form tiles, and a tile's entries are split into items until the device is busy
(flash-decoding, Dao et al. 2023). So one token over a long context is not left to a few programs.

Shapes: N packed tokens; L entries of a sequence; G query heads per kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engine.gpu.layout import ITEM_FIELDS, MOVES, TILE_FIELDS, BufferLayout, Capacity
from outrider.engine.kv.pages import Move
from outrider.engine.step import Segment

Words = npt.NDArray[np.int64]

BLOCK_KEYS = 64
"""Entries that a program reads at a time; items begin at multiples of this number."""
MIN_ROWS, MAX_ROWS = 16, 64
"""Rows of a tile: a matrix product has at least 16, and more than 64 spill from the registers."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan depends on in addition to the sequences."""

    group: int
    """G, the query heads per kv head, the fewest of any layer."""
    page_size: int
    trash: int
    """The slot that padding is written to."""
    items: int
    """How many items the device computes at once."""
    ordered: bool = False
    """True for `kernels.ordered_attention`: nodes of a tree then have paths in place of masks."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tiles and items of a step."""

    tokens: int
    tiles: list[list[int]]
    """Per tile: sequence, the first of its tokens, number of tokens, first item, number of items."""
    items: Sequence[tuple[int, ...]]
    """Per item: tile, first entry, end, and if `ordered`, entries of a split."""

    @property
    def capacity(self) -> Capacity:
        """The smallest capacity that holds the plan."""
        return Capacity(self.tokens, len(self.tiles), len(self.items))


def block_rows(tokens: int, group: int) -> int:
    """Return the rows of a tile in steps of up to `tokens` tokens."""
    rows = min(max(tokens * group, MIN_ROWS), MAX_ROWS)
    return 1 << (max(rows, group) - 1).bit_length()


def tile_width(tokens: int, group: int) -> int:
    """Return the tokens of a tile in steps of up to `tokens` tokens."""
    return min(block_rows(tokens, group) // group, tokens)


def tile_shape(width: int, group: int, most: int) -> tuple[int, int]:
    """Return how a layer with `group` query heads per kv head computes tiles of `width` tokens: into how many
    shares the query heads are cut, so that a tile has at most `most` rows, and its rows with padding.
    """
    cuts = (cut for cut in range(1, group) if group % cut == 0 and width * group // cut <= most)
    cut = next(cuts, group)
    return cut, 1 << (max(width * group // cut, MIN_ROWS) - 1).bit_length()


def graph_capacity(tokens: int, settings: PlanSettings) -> Capacity:
    """Return the capacity that every step of up to `tokens` tokens fits into."""
    return Capacity(tokens, tokens, tokens + settings.items)


def plan_tiles(segments: Sequence[Segment], tokens: int, settings: PlanSettings) -> AttentionPlan:
    """Divide the work of segments that are appended to their sequences; `tokens` includes padding."""
    width = tile_width(tokens, settings.group)
    tiles, ends = [], []
    for index, segment in enumerate(segments):
        kv, count = segment.kv, len(segment.tokens)
        last, chain = kv.length + kv.scratch, kv.is_chain
        for start in range(0, count, width):
            taken = min(width, count - start)
            tiles.append([index, start, taken])
            ends.append(last - count + start + taken if chain else last)
    share = max(BLOCK_KEYS, -(-sum(ends) // settings.items))
    items: list[tuple[int, int, int]] = []
    for tile, end in enumerate(ends):
        # To nearest: a tile that is a little longer than a share is not worth a second item.
        size = _blocks(-(-end // max(1, (end + share // 2) // share)))
        begins = range(0, end, size)
        tiles[tile] += [len(items), len(begins)]
        items += [(tile, begin, min(begin + size, end)) for begin in begins]
    return AttentionPlan(tokens, tiles, items)


def fill(
    plan: AttentionPlan,
    layout: BufferLayout,
    segments: Sequence[Segment],
    moves: Sequence[Move],
    settings: PlanSettings,
) -> Words:
    """Return the used words of a step's buffer."""
    tail = _Tail(layout.tail_at)
    columns = _Columns()
    places = [columns.add(segment, tail, settings.page_size) for segment in segments]
    columns.masks = (_add_paths if settings.ordered else _add_masks)(segments, tail)
    words = np.zeros(tail.end, dtype=np.int64)
    words[layout.tail_at :] = np.concatenate(tail.parts)
    words[:2] = len(plan.items), len(moves)
    _fill_tokens(words, layout, columns, settings)
    if moves:
        words[layout.moves_at :][: 2 * MOVES].reshape(2, MOVES)[:, : len(moves)] = np.array(moves).T
    if segments:
        _fill_tiles(words, layout, plan, places)
    return words


def _one_empty() -> list[Words]:
    """Return a list that can be concatenated even if nothing is added to it."""
    return [np.empty(0, dtype=np.int64)]


@dataclass(slots=True)
class _Tail:
    """The parts of varying size, one after the other."""

    end: int
    parts: list[Words] = field(default_factory=_one_empty)

    def add(self, words: Words) -> int:
        """Add words, and return where they will be in the buffer."""
        at = self.end
        self.parts.append(words)
        self.end += len(words)
        return at


class _Place(NamedTuple):
    """Where a sequence's parts are in the buffer, and how many entries are committed."""

    first: int
    """Its first packed token."""
    length: int
    pages: int
    depths: int
    """Where its depths are; 0 for a chain."""


@dataclass(slots=True)
class _Columns:
    """The values of each token, over all sequences."""

    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    """Empty where all sequences are chains."""
    positions: list[Words] = field(default_factory=_one_empty)
    """One array per sequence, like the slots."""
    slots: list[Words] = field(default_factory=_one_empty)

    def add(self, segment: Segment, tail: _Tail, page_size: int) -> _Place:
        """Add a sequence, and its parts of varying size to the tail. Masks are added after all sequences."""
        kv, first, count = segment.kv, len(self.tokens), len(segment.tokens)
        length, slots, scratch, chain = kv.length, kv.slots, kv.scratch, kv.is_chain
        end = length + scratch
        self.tokens += segment.tokens
        self.own += range(end - count, end)
        self.wanted += [first + index for index in segment.wanted]
        self.positions.append(kv.positions(scratch - count))
        self.slots.append(slots[end - count : end])
        pages = tail.add(slots[:end:page_size] // page_size)
        depths = 0 if chain else tail.add(np.array(kv.depths, dtype=np.int64))
        return _Place(first, length, pages, depths)


def _add_masks(segments: Sequence[Segment], tail: _Tail) -> list[int]:
    """Add the masks of the scratch entries that each token of a tree sees: bit c % 64 of word c // 64 for
    entry c. All masks have equally many words. Return where each token's mask is, 0 for tokens of chains.
    """
    trees = [segment for segment in segments if not segment.kv.is_chain]
    if not trees:
        return []
    width = -(-max(segment.kv.scratch for segment in trees) // 64)
    seen = np.zeros((sum(len(segment.tokens) for segment in trees), 64 * width), dtype=np.bool_)
    places: list[int] = []
    row = 0
    for segment in segments:
        kv, count = segment.kv, len(segment.tokens)
        if kv.is_chain:
            places += [0] * count
            continue
        seen[row : row + count, : kv.scratch] = kv.ancestors(kv.scratch - count)
        places += range(tail.end + row * width, tail.end + (row + count) * width, width)
        row += count
    packed = np.packbits(seen, axis=1, bitorder="little")
    tail.add(packed.view("<i8").astype(np.int64, copy=False).ravel())
    return places


def _add_paths(segments: Sequence[Segment], tail: _Tail) -> list[int]:
    """Add the slots of each token of a tree and of its ancestors in the scratch, by depth. Return where each
    token's path is, 0 for tokens of chains.
    """
    places: list[int] = []
    for segment in segments:
        kv, count = segment.kv, len(segment.tokens)
        if kv.is_chain:
            places += [0] * count
            continue
        rows, offsets = np.nonzero(kv.ancestors(kv.scratch - count))  # parents come before their children
        at = tail.add(kv.slots[kv.length + offsets])
        places += (at + np.searchsorted(rows, np.arange(count))).tolist()
    return places


def _fill_tokens(words: Words, layout: BufferLayout, columns: _Columns, settings: PlanSettings) -> None:
    """Write the per-token sections, except the tile of each token, which `_fill_tiles` writes."""
    for name, padding in (("slots", settings.trash), ("tile_of", -1)):
        at = layout.at(name)
        words[at : at + layout.capacity.tokens] = padding
    sections: dict[str, Sequence[int] | Words] = {
        "tokens": columns.tokens,
        "positions": np.concatenate(columns.positions),
        "slots": np.concatenate(columns.slots),
        "wanted": columns.wanted,
        "own": columns.own,
        "masks": columns.masks,
    }
    for name, column in sections.items():
        at = layout.at(name)
        words[at : at + len(column)] = column


def _fill_tiles(words: Words, layout: BufferLayout, plan: AttentionPlan, places: Sequence[_Place]) -> None:
    """Write tiles and items, and which tile each token is in."""
    rows: list[int] = []
    for sequence, start, count, first_item, splits in plan.tiles:
        first, length, pages, depths = places[sequence]
        rows += (first + start, count, length, pages, depths, 0, first_item, splits, 0)
    tiles = np.array(rows, dtype=np.int64).reshape(-1, TILE_FIELDS)
    tile_of, positions = layout.at("tile_of"), layout.at("positions")
    tokens = int(tiles[-1, 0] + tiles[-1, 1])  # tiles cover the tokens in their order
    # Before a chain's first token all its tokens see everything, and that token too; nodes of a tree may not.
    tiles[:, 8] = np.where(tiles[:, 4] == 0, words[layout.at("own") + tiles[:, 0]] + 1, tiles[:, 2])
    tiles[:, 5] = np.minimum.reduceat(words[positions : positions + tokens], tiles[:, 0])
    words[tile_of : tile_of + tokens] = np.repeat(np.arange(len(tiles)), tiles[:, 1])
    words[layout.tiles_at : layout.tiles_at + tiles.size] = tiles.ravel()
    items = words[layout.items_at : layout.items_at + len(plan.items) * ITEM_FIELDS]
    items.reshape(-1, ITEM_FIELDS)[:, : len(plan.items[0])] = plan.items


def _blocks(entries: int) -> int:
    """Return a number of entries rounded up to whole blocks."""
    return -(-entries // BLOCK_KEYS) * BLOCK_KEYS
