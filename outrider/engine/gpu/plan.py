"""Plans a step for the kernels and writes its buffer: numpy alone, one pass over the sequences.

New tokens of a sequence form tiles, a tile's entries are split into items until the device is busy
(flash-decoding, Dao et al. 2023): one token over a long context is then not the work of a few programs.

Shapes: N packed tokens; L entries of a sequence; G query heads per kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.engine.gpu.layout import ITEM_FIELDS, MOVES, TILE_FIELDS, BufferLayout, Capacity
from outrider.engine.kv.pages import Move, SequenceKv
from outrider.engine.step import Segment

Words = npt.NDArray[np.int64]

BLOCK_KEYS = 64
"""Entries that a program takes in at a time; items begin at multiples of it."""
SHORTEST_ITEM = 2 * BLOCK_KEYS
"""A shorter item costs more to join than it saves."""
MIN_ROWS, MAX_ROWS = 16, 64
"""Rows of a tile: a matrix product has at least 16, more than 64 spill from the registers."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan depends on besides the sequences."""

    group: int
    """G."""
    page_size: int
    trash: int
    """The slot that padding is written to."""
    items: int
    """Items that keep the device busy."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tiles and items of a step."""

    tokens: int
    tiles: list[list[int]]
    """Per tile: sequence, first of its tokens, how many, first item, items."""
    items: list[tuple[int, int, int]]
    """Tile, first entry, end."""

    @property
    def capacity(self) -> Capacity:
        """What just holds the plan."""
        return Capacity(self.tokens, len(self.tiles), len(self.items))


def block_rows(tokens: int, group: int) -> int:
    """Rows of a tile in steps of up to so many tokens."""
    rows = min(max(tokens * group, MIN_ROWS), MAX_ROWS)
    return 1 << (max(rows, group) - 1).bit_length()


def graph_capacity(tokens: int, settings: PlanSettings) -> Capacity:
    """What every step of up to so many tokens fits into."""
    return Capacity(tokens, tokens, tokens + settings.items)


def plan_tiles(segments: Sequence[Segment], tokens: int, settings: PlanSettings) -> AttentionPlan:
    """Divide the work of segments that are appended to their sequences; `tokens` includes padding."""
    width = block_rows(tokens, settings.group) // settings.group
    tiles, ends = [], []
    for index, segment in enumerate(segments):
        kv, count = segment.kv, len(segment.tokens)
        first = kv.length + kv.scratch - count
        for start in range(0, count, width):
            taken = min(width, count - start)
            tiles.append([index, start, taken])
            ends.append(first + start + taken if kv.is_chain else kv.length + kv.scratch)
    longest = max(SHORTEST_ITEM, _blocks(-(-sum(ends) // settings.items)))
    items: list[tuple[int, int, int]] = []
    for tile, end in enumerate(ends):
        first_item = len(items)
        size = _blocks(-(-end // -(-end // longest)))
        items.extend((tile, begin, min(begin + size, end)) for begin in range(0, end, size))
        tiles[tile] += [first_item, len(items) - first_item]
    return AttentionPlan(tokens, tiles, items)


def fill(
    plan: AttentionPlan,
    layout: BufferLayout,
    segments: Sequence[Segment],
    moves: Sequence[Move],
    settings: PlanSettings,
) -> Words:
    """The words of a step's buffer, as far as they are used."""
    tail = _Tail(layout.tail_at)
    places = [_place(segment.kv, len(segment.tokens), tail, settings) for segment in segments]
    words = np.zeros(tail.end, dtype=np.int64)
    words[layout.tail_at :] = np.concatenate(tail.parts)
    words[0] = len(plan.items)
    firsts = _fill_tokens(words, layout, segments, places, settings)
    _fill_moves(words, layout, moves, settings)
    tile_of, positions = layout.at("tile_of"), layout.at("positions")
    words[tile_of : tile_of + layout.capacity.tokens] = -1
    rows = []
    for index, (sequence, start, count, first_item, splits) in enumerate(plan.tiles):
        kv, place, first = segments[sequence].kv, places[sequence], firsts[sequence] + start
        words[tile_of + first : tile_of + first + count] = index
        lowest = int(words[positions + first : positions + first + count].min())
        rows.append([first, count, kv.length, place.pages, place.depths, lowest, first_item, splits])
    words[layout.tiles_at : layout.tiles_at + len(rows) * TILE_FIELDS] = np.array(
        rows, dtype=np.int64
    ).ravel()
    items_at = layout.items_at
    items = np.array([(*item, 0) for item in plan.items], dtype=np.int64)
    words[items_at : items_at + len(plan.items) * ITEM_FIELDS] = items.ravel()
    return words


@dataclass(slots=True)
class _Tail:
    """What varies in size, piece behind piece."""

    end: int
    parts: list[Words] = field(default_factory=lambda: [np.empty(0, dtype=np.int64)])

    def add(self, words: Words) -> int:
        """Where the words will stand."""
        at = self.end
        self.parts.append(words)
        self.end += len(words)
        return at


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence's part of the tail stands; 0 for what a chain has not."""

    pages: int
    depths: int = 0
    masks: int = 0
    mask_words: int = 0
    """Words of one token's mask."""


def _place(kv: SequenceKv, count: int, tail: _Tail, settings: PlanSettings) -> _Place:
    used = kv.slots[: kv.length + kv.scratch : settings.page_size]
    pages = tail.add(used // settings.page_size)
    if kv.is_chain:
        return _Place(pages)
    masks = mask_words(kv.ancestors(kv.scratch - count))
    depths = tail.add(np.array(kv.depths, dtype=np.int64))
    return _Place(pages, depths, tail.add(masks.ravel()), masks.shape[1])


def mask_words(seen: npt.NDArray[np.bool_]) -> Words:
    """[rows, columns] as bits, column c in bit c % 64 of word c // 64: [rows, ceil(columns / 64)]."""
    missing = -seen.shape[1] % 64
    packed = np.packbits(np.pad(seen, ((0, 0), (0, missing))), axis=1, bitorder="little")
    return packed.view("<i8").astype(np.int64, copy=False)


def _fill_tokens(
    words: Words,
    layout: BufferLayout,
    segments: Sequence[Segment],
    places: Sequence[_Place],
    settings: PlanSettings,
) -> list[int]:
    """Write the per-token sections; returns the packed position of each segment's first token."""
    slots_at = layout.at("slots")
    words[slots_at : slots_at + layout.capacity.tokens] = settings.trash
    firsts: list[int] = []
    wanted: list[int] = []
    start = 0
    for segment, place in zip(segments, places, strict=True):
        kv, count = segment.kv, len(segment.tokens)
        entry = kv.length + kv.scratch - count
        columns: dict[str, Words] = {
            "tokens": np.array(segment.tokens, dtype=np.int64),
            "positions": kv.positions(kv.scratch - count),
            "slots": kv.slots[entry : entry + count],
            "own": np.arange(entry, entry + count),
        }
        if place.masks:
            columns["masks"] = place.masks + np.arange(count) * place.mask_words
        for name, column in columns.items():
            at = layout.at(name) + start
            words[at : at + count] = column
        firsts.append(start)
        wanted.extend(start + index for index in segment.wanted)
        start += count
    wanted_at = layout.at("wanted")
    words[wanted_at : wanted_at + len(wanted)] = wanted
    return firsts


def _fill_moves(words: Words, layout: BufferLayout, moves: Sequence[Move], settings: PlanSettings) -> None:
    pairs = np.full((MOVES, 2), settings.trash, dtype=np.int64)
    if moves:
        pairs[: len(moves)] = moves
    words[layout.moves_at : layout.moves_at + 2 * MOVES] = pairs.T.ravel()


def _blocks(entries: int) -> int:
    """So many entries rounded up to whole blocks."""
    return -(-entries // BLOCK_KEYS) * BLOCK_KEYS
