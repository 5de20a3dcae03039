"""Replicas that one session lost in a row, and when it may try the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.errors import InternalError, OutriderError, Overloaded

DRAFT_RETRY_SECONDS = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Wait after the first, second, ... draft lost in a row without a block; the last one repeats."""
VERIFY_RETRY_SECONDS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Wait after the first, second, ... verify replica lost in a row without a verdict."""


@dataclass(slots=True)
class Losses:
    """Replicas of one kind that were lost in a row. Times in seconds."""

    count: int = 0
    internal: int = 0
    """Of these, lost by a mistake of their own."""
    since: float = 0.0
    """The first of them."""
    retry_at: float = 0.0

    def add(self, error: OutriderError, now: float, waits: Sequence[float]) -> None:
        """One more; `waits` are those after the first, second, ... loss."""
        if self.count == 0:
            self.since = now
        self.internal += isinstance(error, InternalError)
        least = (error.retry_after or 0.0) if isinstance(error, Overloaded) and self.count else 0.0
        self.retry_at = now + max(waits[min(self.count, len(waits) - 1)], least)
        self.count += 1
