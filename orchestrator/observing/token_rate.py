"""How many tokens this orchestrator makes, for a balancer in front of several."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10
"""Over which tokens are counted."""


class TokenRate:
    """Tokens per second over the last `WINDOW_SECONDS`; times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()
        """Whole seconds, and the tokens of each."""

    def add(self, tokens: int, now: float) -> None:
        """Tokens were committed."""
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            tokens += self._counts.pop()[1]
        self._counts.append((second, tokens))
        self._forget(now)

    def per_second(self, now: float) -> float:
        """The rate."""
        self._forget(now)
        return sum(tokens for _, tokens in self._counts) / WINDOW_SECONDS

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - WINDOW_SECONDS:
            self._counts.popleft()
