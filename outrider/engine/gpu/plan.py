"""Plans a step for the kernels and writes its buffer, without torch, in one pass over the sequences.

New tokens of a sequence form tiles, and a tile's entries are split into items until the device is busy
(flash-decoding, Dao et al. 2023). So one token over a long context is not left to a few programs.

Shapes: N packed tokens; L entries of a sequence; G query heads per kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engine.gpu.layout import COUNTS, MOVES, PER_TOKEN, BufferLayout, Capacity
from outrider.engine.kv.pages import Move, SequenceKv
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


class AttentionPlan(NamedTuple):
    """The tiles and items of a step."""

    tokens: int
    tiles: list[list[int]]
    """Per tile: sequence, the first of its tokens, number of tokens, first item, number of items."""
    items: Sequence[tuple[int, int, int, int]]
    """Per item: tile, first entry, end, and entries of a split, which is 0 unless `ordered`."""

    @property
    def capacity(self) -> Capacity:
        """The smallest capacity that holds the plan."""
        return Capacity(self.tokens, len(self.tiles), len(self.items))


def block_rows(tokens: int, group: int) -> int:
    """Return the rows of a tile in steps of up to `tokens` tokens."""
    rows = min(max(tokens * group, MIN_ROWS), MAX_ROWS)
    return 1 << (max(rows, group) - 1).bit_length()


@cache
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
    tiles: list[list[int]] = []
    ends: list[int] = []
    for index, segment in enumerate(segments):
        kv, count = segment.kv, len(segment.tokens)
        last, chain = kv.length + kv.scratch, kv.is_chain
        for start in range(0, count, width):
            taken = min(width, count - start)
            tiles.append([index, start, taken])
            ends.append(last - count + start + taken if chain else last)
    share = max(BLOCK_KEYS, -(-sum(ends) // settings.items))
    items: list[tuple[int, int, int, int]] = []
    for tile, end in enumerate(ends):
        # To nearest: a tile that is a little longer than a share is not worth a second item.
        size = _blocks(-(-end // max(1, (end + share // 2) // share)))
        begins = range(0, end, size)
        tiles[tile] += len(items), len(begins)
        items += [(tile, begin, min(begin + size, end), 0) for begin in begins]
    return AttentionPlan(tokens, tiles, items)


def new_words(count: int) -> Words:
    """Return memory for `count` words, whose values are arbitrary."""
    return np.empty(count, dtype=np.int64)


def fill(
    plan: AttentionPlan,
    layout: BufferLayout,
    segments: Sequence[Segment],
    moves: Sequence[Move],
    settings: PlanSettings,
    room: Callable[[int], Words] = new_words,
) -> Words:
    """Return the used words of a step's buffer; `room` returns memory for a number of words."""
    tail = _Tail(layout.tail_at)
    columns = _Columns()
    places = [columns.add(segment, tail, settings.page_size) for segment in segments]
    if columns.trees:
        (_add_paths if settings.ordered else _add_masks)(columns, tail)
    tiles = columns.add_tiles(plan.tiles, places)
    words = room(tail.end)
    words[: layout.tail_at] = 0
    words[0], words[1] = len(plan.items), len(moves)
    columns.write(words, layout, settings.trash)
    if moves:
        words[layout.moves_at :][: 2 * MOVES].reshape(2, MOVES)[:, : len(moves)] = np.array(moves).T
    words[layout.tiles_at : layout.tiles_at + len(tiles)] = tiles
    items = [number for item in plan.items for number in item]
    words[layout.items_at : layout.items_at + len(items)] = items
    if tail.parts:
        np.concatenate(tail.parts, out=words[layout.tail_at :])
    return words


@dataclass(slots=True)
class _Tail:
    """The parts of varying size, one after the other."""

    end: int
    parts: list[Words] = field(default_factory=list)

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


class _Tree(NamedTuple):
    """A sequence whose scratch is no chain."""

    kv: SequenceKv
    first: int
    """Its first packed token."""
    start: int
    """The scratch entry of that token."""
    tokens: int
    """How many of its tokens are new."""


class _Columns:
    """The values of each token, over all sequences.

    They are lists: for the few tokens of most steps, calls of numpy take longer than loops.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.own: list[int] = []
        self.masks: list[int] = []
        self.tile_of: list[int] = []
        self.wanted: list[int] = []
        self.trees: list[_Tree] = []

    def add(self, segment: Segment, tail: _Tail, page_size: int) -> _Place:
        """Add a sequence, and its parts of varying size to the tail. The masks of trees and the tiles are
        added after all sequences.
        """
        kv, first, count = segment.kv, len(self.tokens), len(segment.tokens)
        length, scratch, chain = kv.length, kv.scratch, kv.is_chain
        end = length + scratch
        entries = range(end - count, end)
        self.tokens += segment.tokens
        self.slots += kv.slots[end - count : end].tolist()
        self.own += entries
        self.masks += [0] * count
        self.wanted += [first + index for index in segment.wanted]
        pages = tail.add(kv.page_table[: -(-end // page_size)])
        if chain:
            self.positions += entries
            return _Place(first, length, pages, 0)
        self.positions += [length - 1 + depth for depth in kv.depths[scratch - count :]]
        self.trees.append(_Tree(kv, first, scratch - count, count))
        return _Place(first, length, pages, tail.add(np.array(kv.depths, dtype=np.int64)))

    def add_tiles(self, tiles: Sequence[Sequence[int]], places: Sequence[_Place]) -> list[int]:
        """Add the tile of each token, and return the words of all tiles; see `AttentionPlan.tiles`."""
        words: list[int] = []
        for number, (sequence, start, count, first_item, splits) in enumerate(tiles):
            first, length, pages, depths = places[sequence]
            token = first + start
            self.tile_of += [number] * count
            lowest = min(self.positions[token : token + count])
            # Before a chain's first token all its tokens see everything, and that token too; nodes of a tree
            # may not.
            seen = length if depths else self.own[token] + 1
            words += (token, count, length, pages, depths, lowest, first_item, splits, seen)
        return words

    def write(self, words: Words, layout: BufferLayout, trash: int) -> None:
        """Write the per-token sections into words that are zero; padding goes to the slot `trash`."""
        count = len(self.tokens)
        columns = (self.tokens, self.positions, self.slots, self.own, self.masks, self.tile_of)
        sections = words[COUNTS : layout.moves_at].reshape(len(PER_TOKEN), -1)
        sections[: len(columns), :count] = columns
        for name, padding in (("slots", trash), ("tile_of", -1)):
            at = layout.at(name)
            words[at + count : at + layout.capacity.tokens] = padding
        wanted = layout.at("wanted")
        words[wanted : wanted + len(self.wanted)] = self.wanted


def _add_masks(columns: _Columns, tail: _Tail) -> None:
    """Add the masks of the scratch entries that each token of a tree sees: bit c % 64 of word c // 64 for
    entry c. All masks have equally many words.
    """
    width = -(-max([tree.kv.scratch for tree in columns.trees]) // 64)
    packed = b"".join([tree.kv.packed_ancestors(tree.start, 8 * width) for tree in columns.trees])
    at = tail.add(np.frombuffer(packed, dtype="<i8"))
    for _, first, _, count in columns.trees:
        columns.masks[first : first + count] = range(at, at + count * width, width)
        at += count * width


def _add_paths(columns: _Columns, tail: _Tail) -> None:
    """Add the slots of each token of a tree and of its ancestors in the scratch, by depth."""
    for kv, first, start, count in columns.trees:
        rows, offsets = np.nonzero(kv.ancestors(start))  # parents come before their children
        at = tail.add(kv.slots[kv.length + offsets])
        columns.masks[first : first + count] = (at + np.searchsorted(rows, np.arange(count))).tolist()


def _blocks(entries: int) -> int:
    """Return a number of entries rounded up to whole blocks."""
    return -(-entries // BLOCK_KEYS) * BLOCK_KEYS
