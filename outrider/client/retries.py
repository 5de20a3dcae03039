"""Decides when a request that failed, or a stream that broke, is tried again. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.protocol.errors import OutriderError, Overloaded, Unavailable


@dataclass(frozen=True, slots=True)
class Retries:
    """Seconds before the first, second, ... attempt in a row that brings no token; after the last there is
    none. A service that says when to come again is not asked earlier."""

    begin: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Before anything has come; empty: what is refused is an error at once."""
    resume: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
    """Once a stream has begun; together longer than an orchestrator takes to be started again."""
    jitter: float = 0.25
    """Each pause is longer by a random share of itself up to this, so that not all come back at once."""


NEVER = Retries((), ())
"""The first failure is final."""


@dataclass(slots=True)
class Attempts:
    """The attempts at one request."""

    retries: Retries
    draw: Callable[[], float] = random.random
    """Below 1."""
    count: int = 0
    """Attempts to resume it."""
    _in_vain: int = 0
    _progress: int = field(default=0)

    def pause(self, error: OutriderError, begun: bool, progress: int) -> float | None:
        """Seconds until the next attempt when `error` ended one; None: there is none to make.

        `begun`: the request is running, `progress` grows with all that it has brought.
        """
        if progress > self._progress:
            self._progress, self._in_vain = progress, 0
        pauses = self.retries.resume if begun else self.retries.begin
        if not isinstance(error, Unavailable | Overloaded) or self._in_vain >= len(pauses):
            return None
        pause = max(pauses[self._in_vain], error.retry_after or 0.0)
        self._in_vain += 1
        self.count += begun
        return pause * (1.0 + self.retries.jitter * self.draw())
