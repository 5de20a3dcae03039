"""How fast a session goes: tokens per second, decayed."""

from __future__ import annotations

WEIGHT = 0.2
"""Share of the newest observation."""


class Decayed:
    """A decayed mean; None before the first observation."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        """Take one observation into account."""
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)


class Pace:
    """Tokens per second of one session, from its verdicts.

    Until two verdicts have told the time between them, the target's forward stands for it.
    """

    def __init__(self) -> None:
        self._tokens = Decayed()
        self._seconds = Decayed()
        self._last: float | None = None

    def observe(self, tokens: int, forward_seconds: float, now: float) -> None:
        """A verdict of `tokens` tokens arrived at `now`."""
        self._tokens.observe(tokens)
        if self._last is not None:
            self._seconds.observe(now - self._last)
        elif forward_seconds > 0.0:
            self._seconds = Decayed(forward_seconds)
        self._last = now

    @property
    def period(self) -> float | None:
        """Seconds between verdicts; None when nothing is known."""
        return self._seconds.value

    @property
    def rate(self) -> float | None:
        """Tokens per second; None when nothing is known."""
        if self._tokens.value is None or not self._seconds.value:
            return None
        return self._tokens.value / self._seconds.value
