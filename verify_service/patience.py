"""How long a session waits for candidates before it steps with those at hand.

One rule for hits and misses. With `expected_now` tokens to be had from a step at once and
`ready_tokens` from one with a complete tree, waiting brings the difference and takes the measured time
from a verdict to the draft's answer. It pays while that is more tokens per second than the session
makes anyway. All times are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.messages import VerifyPolicy

DECAY = 0.8
"""What is left of an estimate's weight after one more observation."""
SEQUENTIAL_PATIENCE = (0.25, 2.0)
"""Shortest and longest patience of a sequential session, in seconds."""
SEQUENTIAL_TURNAROUNDS = 10.0
"""A sequential session waits this many times the measured time, within those bounds."""
SPREAD = 3.0
"""How many mean deviations later than usual a block may still come."""
MAX_EXPIRED = 16


@dataclass(slots=True)
class Patience:
    """What one session has learned about its draft, and what follows from it."""

    max_seconds: float
    """Longest wait of a pipelined session."""
    turnaround: float | None = None
    """Decayed mean seconds from a verdict to the first useful block that knows of it; None: none came yet."""
    deviation: float = 0.0
    """Decayed mean distance of that time from its mean."""
    ready_tokens: float = 0.0
    """Decayed mean of the expected tokens of a step when a complete tree was at hand."""
    expired: int = 0
    """Waits in a row that ended without a useful block."""
    _tokens: float = 0.0
    _seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of the session; 0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def remaining(self, waited: float) -> float | None:
        """Seconds until a block should come when none came in `waited`; None: none is expected any more."""
        if self.turnaround is None or self.expired or waited >= self._longest():
            return None
        return max(self.turnaround - waited, self.deviation)

    def gain(self, expected_now: float) -> float:
        """Tokens that a complete tree would bring beyond those to be had at once."""
        return max(self.ready_tokens - expected_now, 0.0)

    def answered(self, seconds: float) -> None:
        """A useful block came `seconds` after the verdict that it answers."""
        self.expired = 0
        if self.turnaround is None:
            self.turnaround, self.deviation = seconds, seconds / 2
            return
        self.deviation = DECAY * self.deviation + (1 - DECAY) * abs(seconds - self.turnaround)
        self.turnaround = DECAY * self.turnaround + (1 - DECAY) * seconds

    def completed(self, expected: float) -> None:
        """A ready block came; a step with the tree as it is now should commit `expected` tokens."""
        before = self.ready_tokens or expected
        self.ready_tokens = DECAY * before + (1 - DECAY) * expected

    def ran_out(self) -> None:
        """The deadline passed without a useful block; the next wait is half as long."""
        self.expired = min(self.expired + 1, MAX_EXPIRED)

    def stepped(self, tokens: int, seconds: float) -> None:
        """A verdict committed `tokens`, `seconds` after the verdict before it."""
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + seconds

    def wait(self, policy: VerifyPolicy, expected_now: float) -> float:
        """Seconds after the last verdict until which to wait for a ready block; 0: do not wait."""
        if policy is VerifyPolicy.OFF:
            return 0.0
        if policy is VerifyPolicy.SEQUENTIAL:
            return self._sequential() * 0.5**self.expired
        return self._pipelined(expected_now)

    def _sequential(self) -> float:
        shortest, longest = SEQUENTIAL_PATIENCE
        if self.turnaround is None:
            return longest
        return min(max(SEQUENTIAL_TURNAROUNDS * self.turnaround, shortest), longest)

    def _pipelined(self, expected_now: float) -> float:
        """Zero unless the gain pays for the usual wait; then until it no longer would, or no block is due."""
        if self.turnaround is None or not self.rate:
            return 0.0
        pays_until = self.gain(expected_now) / self.rate
        if self.turnaround * 2**self.expired >= pays_until:
            return 0.0
        return min(pays_until, self._longest())

    def _longest(self) -> float:
        """The latest that a block comes as a rule, within the limit."""
        return min((self.turnaround or 0.0) + SPREAD * self.deviation, self.max_seconds)
