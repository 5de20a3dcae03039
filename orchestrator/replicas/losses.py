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
    """Those of them that were lost by an internal error."""
    since: float = 0.0
    """When the first of them was lost."""
    retry_at: float = 0.0

    def add(self, error: OutriderError, now: float, waits: Sequence[float]) -> None:
        """Count one more loss; `waits` are the seconds to wait after the first, second, ... loss."""
        if self.count == 0:
            self.since = now
        self.internal += isinstance(error, InternalError)
        asked = (error.retry_after or 0.0) if isinstance(error, Overloaded) and self.count else 0.0
        self.retry_at = now + max(waits[min(self.count, len(waits) - 1)], asked)
        self.count += 1
