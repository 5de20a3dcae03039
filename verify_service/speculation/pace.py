"""Tells whether a session is behind the time per token that its caller asked for. Pure: times are passed
in."""

from __future__ import annotations

LATE_WEIGHT = 4.0
"""Tokens of other sessions that one token of a session behind its pace is worth. This bounds what such
sessions may take: a node that brings one of them a token costs the others at most this many."""


class Pace:
    """Counts tokens from the first verdict on: before it, candidates cannot make a session faster."""

    def __init__(self, seconds_per_token: float) -> None:
        """`seconds_per_token` is 0 where the caller asked for no pace."""
        self._seconds_per_token = seconds_per_token
        self._began: float | None = None
        self._first = 0
        """Committed length at the first verdict."""

    def observe(self, now: float, length: int) -> None:
        """Note that a verdict leaves at `now`; with it `length` tokens are committed."""
        if self._began is None:
            self._began, self._first = now, length

    def weight(self, now: float, length: int) -> float:
        """Return how many tokens of others one of its tokens is worth: `LATE_WEIGHT` while it is late,
        otherwise 1."""
        if not self._seconds_per_token or self._began is None:
            return 1.0
        due = (now - self._began) / self._seconds_per_token
        return LATE_WEIGHT if length - self._first <= due - 1.0 else 1.0
