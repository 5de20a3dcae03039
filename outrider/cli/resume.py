"""When a stream that broke is taken up again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import OutriderError, Overloaded, Unavailable

PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before the first, second, ... attempt in a row that brought no token; after the last there is none.
Together longer than an orchestrator takes to be started again."""


@dataclass(slots=True)
class Resumptions:
    """The attempts to get the rest of one continuation."""

    count: int = 0
    """All of them."""
    _in_vain: int = 0
    """In a row, without a token."""
    _tokens: int = 0
    """Received when the stream broke last."""

    def pause(self, error: OutriderError, tokens: int) -> float | None:
        """Seconds until the next attempt, when `error` ended the stream after `tokens`; None: there is none
        to make."""
        if tokens > self._tokens:
            self._tokens, self._in_vain = tokens, 0
        if not isinstance(error, Unavailable | Overloaded) or self._in_vain == len(PAUSES):
            return None
        pause = PAUSES[self._in_vain]
        self._in_vain += 1
        self.count += 1
        return max(pause, error.retry_after or 0.0) if isinstance(error, Overloaded) else pause
