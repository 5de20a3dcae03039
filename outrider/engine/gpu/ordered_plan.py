"""Plans a step for attention in one order: what is added to what follows from a token's position alone.

See `outrider.engine.gpu.kernels.ordered_attention`. The plan decides only which program does it: a tile is
one item, or each of its splits is one where there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.engine.gpu.plan import AttentionPlan, PlanSettings, block_rows
from outrider.engine.step import Segment

SPLIT = 256
"""Entries of a split; longer texts have longer ones."""
MAX_SPLITS = 32
"""Splits of a text: joining them takes one after the other."""
ROOM = 4
"""So many times the items that keep a device busy: a tile whose splits find no room is one program's work."""


def room_for(items: int) -> int:
    """Items that a plan may have beside one for each tile; `items` keep the device busy."""
    return ROOM * max(items, MAX_SPLITS)


def split_at(position: int) -> int:
    """Entries of a split of the text that ends at a position."""
    return SPLIT << (position // (SPLIT * MAX_SPLITS)).bit_length()


def plan_in_order(segments: Sequence[Segment], tokens: int, settings: PlanSettings) -> AttentionPlan:
    """Divide the work of segments that are appended to their sequences; `tokens` includes padding."""
    width = block_rows(1, settings.group) // settings.group
    tiles: list[list[int]] = []
    items: list[tuple[int, ...]] = []
    room = settings.items
    for index, segment in enumerate(segments):
        for start, taken, end, split in _cuts(segment, width):
            splits = -(-end // split)
            splits, step = (1, end) if splits - 1 > room else (splits, split)
            room -= splits - 1
            tile = len(tiles)
            tiles.append([index, start, taken, len(items), splits])
            items += [(tile, begin, min(begin + step, end), split) for begin in range(0, end, step)]
    return AttentionPlan(tokens, tiles, items)


def _cuts(segment: Segment, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Up to `width` new tokens each whose splits are as long: the first, how many, entries of the longest
    text, entries of a split.
    """
    kv, count = segment.kv, len(segment.tokens)
    positions = kv.positions(kv.scratch - count).tolist()
    start = 0
    for split, alike in groupby(positions, split_at):
        ends = [position + 1 for position in alike]
        for first in range(0, len(ends), width):
            taken = ends[first : first + width]
            yield start + first, len(taken), max(taken), split
        start += len(ends)
