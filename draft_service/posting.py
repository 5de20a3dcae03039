"""When the nodes of a session go out. Pure: times are passed in.

A block costs the verify side time that its forwards lose, so nodes wait for company: a single session's go
out every now and then while a step is in flight, in larger batches once, shortly before it ends, because the
next one begins at once. Only the answer to a verdict, the block that says ready, does not wait.
"""

from __future__ import annotations

from outrider.allowance import BLOCKS

GAP = 0.15
"""Share of a round between blocks, and before the first one for each session that shares the step."""
LATEST_FIRST = 0.6
"""Share of a round after which the first nodes drafted ahead go out at the latest."""
GAP_PER_SESSION = 1e-3
"""Seconds between blocks for each session that shares the step: many sessions send one block each."""


class Posting:
    """The next time at which one session's nodes should go out."""

    def __init__(self) -> None:
        self.sparse = False
        """One block per round is all there is time for: even the one that says ready waits for its time."""
        self._blocks = 0
        """Sent since the last verdict."""
        self._due = 0.0
        self._gap = 0.0

    def verdict(self, now: float, period: float | None, batch_size: int) -> None:
        """A round of about `period` seconds with `batch_size` sessions begins."""
        self._blocks = 0
        period = period or 0.0
        self._gap = max(GAP * period, GAP_PER_SESSION * batch_size)
        latest = LATEST_FIRST * period
        self.sparse = GAP_PER_SESSION * batch_size > latest > 0.0
        self._due = now + min(GAP * batch_size * period, latest)

    def sent(self, now: float) -> None:
        """A block went out."""
        self._blocks += 1
        self._due = max(self._due, now + self._gap)

    def due(self, now: float) -> bool:
        """True when nodes that are not needed at once should go out."""
        return now >= self._due

    @property
    def spent(self) -> bool:
        """True when, until the next verdict, only the block that says ready may still go out."""
        return self._blocks >= BLOCKS - 1
