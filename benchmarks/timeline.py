"""Computes figures about the pipeline from the timeline of a request. Pure.

idle         share of the decoding time in which the target worked for no session
efficiency   target step time / mean period of a round: 1 is the floor of two given models
overlap      share of the target's working time during which the draft worked too
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.client import Complete, TimelineEvent

Interval = tuple[int, int]
"""Start and end in nanoseconds."""


def pipeline_figures(end: Complete) -> dict[str, float]:
    """Figures of one request; the first verify bar is the prefill and is left out. None without steps."""
    verify = bars(end.timeline, "verify")
    if len(verify) < 2:
        return {}
    prefill, steps = verify[0], verify[1:]
    decode = steps[-1][1] - prefill[1]
    working = length(steps)
    both = length(intersect(joined(steps), joined(bars(end.timeline, "draft"))))
    return {
        "idle": min(1.0, end.speculation["idle_micros"] * 1e3 / decode),
        "efficiency": working / decode,
        "overlap": both / working,
    }


def bars(timeline: Iterable[TimelineEvent], lane: str) -> list[Interval]:
    """The bars of a lane in order of their start."""
    return sorted((event.start_ns, event.end_ns) for event in timeline if event.lane == lane)


def joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Sorted intervals; those that touch or overlap are made one."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """Total of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intervals in which both run; each argument is sorted and disjoint."""
    overlaps = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in overlaps if start < end]
