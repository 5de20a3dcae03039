"""Decides when a request that failed, or a stream that broke, is tried again. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from outrider.protocol.errors import NotRead, OutriderError, Overloaded, Unavailable


@dataclass(frozen=True, slots=True)
class Retries:
    """Pauses in seconds before the first, second, ... retry since the last progress; after the last pause
    the request fails. If the service says when to retry, the pause is at least that long."""

    begin: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Pauses before the stream has begun; empty: the first refusal is an error."""
    resume: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
    """Pauses once the stream has begun; together longer than the restart of an orchestrator."""
    jitter: float = 0.25
    """Each pause grows by a random share of itself, at most this, so that not all clients retry at once."""


NEVER = Retries((), ())
"""No retries: the first failure is final."""


@dataclass(slots=True)
class Attempts:
    """The attempts at one request."""

    retries: Retries
    draw: Callable[[], float] = random.random
    """Draws a random number of at least 0 and below 1."""
    count: int = 0
    """Number of attempts to resume the request."""
    _in_vain: int = 0
    _progress: int = 0

    def pause(self, error: OutriderError, begun: bool, progress: int) -> float | None:
        """Seconds until the next attempt after `error` ended one; None: no more attempts.

        `begun`: the stream has begun; `progress` grows with everything that has been received.
        """
        if progress > self._progress:
            self._progress, self._in_vain = progress, 0
        pauses = self.retries.resume if begun else self.retries.begin
        if not isinstance(error, Unavailable | Overloaded | NotRead) or self._in_vain >= len(pauses):
            return None
        pause = max(pauses[self._in_vain], error.retry_after or 0.0)
        self._in_vain += 1
        self.count += begun
        return pause * (1.0 + self.retries.jitter * self.draw())
