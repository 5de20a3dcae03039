"""Plans a step for attention in one order: the order of additions depends only on a token's position.

See `outrider.engine.gpu.kernels.ordered_attention`. The plan only decides which program computes what: a tile
is one item, or, where there is room, each of its splits is an item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.engine.gpu.plan import AttentionPlan, PlanSettings, block_rows
from outrider.engine.step import Segment

SPLIT = 256
"""Entries of a split. Longer texts have longer splits."""
MAX_SPLITS = 32
"""Most splits of a text: they are joined one after the other."""
ROOM = 4
"""Factor of the items that keep a device busy. If a tile's splits do not fit in this room, one program
computes it."""


def room_for(items: int) -> int:
    """Items that a plan may have in addition to one per tile; `items` is how many keep the device busy."""
    return ROOM * max(items, MAX_SPLITS)


def split_at(position: int) -> int:
    """Return how many entries a split has in the text that ends at a position."""
    return SPLIT << (position // (SPLIT * MAX_SPLITS)).bit_length()


def ordered_width(group: int) -> int:
    """Return the tokens of a tile, the same in steps of any size."""
    return block_rows(1, group) // group


def plan_in_order(segments: Sequence[Segment], tokens: int, settings: PlanSettings) -> AttentionPlan:
    """Divide the work of segments that are appended to their sequences; `tokens` includes padding."""
    width = ordered_width(settings.group)
    tiles: list[list[int]] = []
    items: list[tuple[int, int, int, int]] = []
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
    """Yield groups of up to `width` new tokens with splits of equal length: the first token, their number,
    the entries of the longest text, the entries of a split.
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
