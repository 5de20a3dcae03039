"""The steps of one request as bars in lanes, laid out for a picture or as a Chrome trace. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.client.results import TimelineEvent

LANES = ("draft", "wire", "verify")


@dataclass(frozen=True, slots=True)
class Placed:
    """A bar with its row in its lane; times in milliseconds since the first bar began."""

    bar: TimelineEvent
    row: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class TimelineLayout:
    """All bars, in rows such that none overlap, and the number of rows of each lane."""

    placed: tuple[Placed, ...]
    rows: dict[str, int]
    total_ms: float

    def of(self, lane: str) -> list[Placed]:
        """The bars of one lane, by start."""
        return [placed for placed in self.placed if placed.bar.lane == lane]

    def busy_share(self, lane: str) -> float:
        """Share of the time in which the lane had at least one bar."""
        busy = end = 0.0
        for placed in self.of(lane):
            busy += max(0.0, placed.end_ms - max(end, placed.start_ms))
            end = max(end, placed.end_ms)
        return busy / self.total_ms if self.total_ms else 0.0


def lay_out(bars: Sequence[TimelineEvent]) -> TimelineLayout:
    """Give every bar the first row of its lane that is free when it begins."""
    ordered = sorted(bars, key=lambda bar: (bar.start_ns, bar.end_ns))
    origin = ordered[0].start_ns if ordered else 0
    free_at: dict[str, list[int]] = {lane: [] for lane in LANES}
    placed = []
    for bar in ordered:
        row = _free_row(free_at[bar.lane], bar)
        placed.append(Placed(bar, row, (bar.start_ns - origin) / 1e6, (bar.end_ns - origin) / 1e6))
    rows = {lane: max(1, len(ends)) for lane, ends in free_at.items()}
    return TimelineLayout(tuple(placed), rows, max((item.end_ms for item in placed), default=0.0))


def to_trace(bars: Sequence[TimelineEvent]) -> dict[str, Any]:
    """Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

    Each row is a thread, because viewers drop bars that overlap in one.
    """
    layout = lay_out(bars)
    threads = [(lane, row) for lane in LANES for row in range(layout.rows[lane])]
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
        for tid, (lane, _) in enumerate(threads, 1)
    ]
    slices = [
        {
            "ph": "X",
            "pid": 1,
            "tid": threads.index((placed.bar.lane, placed.row)) + 1,
            "name": placed.bar.name,
            "cat": placed.bar.lane,
            "ts": placed.bar.start_ns / 1000,
            "dur": placed.bar.duration_us,
            "args": asdict(placed.bar),
        }
        for placed in layout.placed
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + slices}


def _free_row(free_at: list[int], bar: TimelineEvent) -> int:
    for row, end in enumerate(free_at):
        if end <= bar.start_ns:
            free_at[row] = bar.end_ns
            return row
    free_at.append(bar.end_ns)
    return len(free_at) - 1
