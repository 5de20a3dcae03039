"""What a session knows about its draft's answers: when they come, and what a complete tree would bring.

The scheduler decides over all sessions whether the next step waits for answers (`scheduler.seconds_to_wait`);
only a sequential session waits for its own. All times are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf

from outrider.speculation.decayed import WEIGHT

SEQUENTIAL_SECONDS = 2.0
"""Longest wait of a sequential session, in seconds. A lost draft ends the wait at once; this is for a silent
one."""
MAX_PATIENCE = 0.05
"""Longest wait of a pipelined session, in seconds: a bound for its caller's sake. Halved or doubled, it
changes none of the simulated loads."""
SPREAD = 3.0
"""Mean deviations after its usual time until which a block is still expected."""
MAX_REMEMBERED = 16
"""Most of a complete tree's best nodes that are remembered."""


@dataclass(slots=True)
class Patience:
    """What one session has learned about its draft; a new session starts with what another has learned."""

    max_seconds: float
    """Longest wait of a pipelined session, in seconds."""
    turnaround: float | None = None
    """Decayed mean seconds from a verdict to the first useful block that knows it; None: no such block came
    yet."""
    deviation: float = 0.0
    """Decayed mean distance of that time from its mean."""
    ready_probabilities: list[float] = field(default_factory=list)
    """Decayed mean probabilities that the best nodes of a complete tree are committed, in falling order."""
    hits: float = 1.0
    """Decayed share of steps whose bonus token was already a candidate, so that the draft could be ahead."""
    expired: int = 0
    """Steps in a row that began without the block that was due."""

    def successor(self) -> Patience:
        """Return what a new session starts with: the same times, and no expired waits."""
        return replace(self, ready_probabilities=[*self.ready_probabilities], expired=0)

    @property
    def saved(self) -> float:
        """Mean seconds per step that a draft saves by working while the target computes; infinite before its
        first answer."""
        return inf if self.turnaround is None else self.hits * self.turnaround

    def due(self, waited: float) -> float | None:
        """Return the seconds until a block should come if none came in `waited` seconds; None: none is
        expected any more."""
        if self.turnaround is None or self.expired or self.overdue(waited):
            return None
        return max(self.turnaround - waited, self.deviation)

    def overdue(self, waited: float) -> bool:
        """True if a block should have come by now, or if no block ever came."""
        longest = (self.turnaround or 0.0) + SPREAD * self.deviation
        return waited >= min(longest, self.max_seconds)

    def gain(self, probabilities: Sequence[float], price: float) -> float:
        """Return the tokens that a complete tree brings in addition to the present nodes, minus the price of
        each node.

        `probabilities` are those of the present nodes.
        """
        return max(_profit(self.ready_probabilities, price) - _profit(probabilities, price), 0.0)

    def answered(self, seconds: float) -> None:
        """Note that a useful block came `seconds` after the verdict that it answers."""
        self.expired = 0
        if self.turnaround is None:
            self.turnaround, self.deviation = seconds, seconds / 2
            return
        self.deviation += WEIGHT * (abs(seconds - self.turnaround) - self.deviation)
        self.turnaround += WEIGHT * (seconds - self.turnaround)

    def completed(self, probabilities: Sequence[float]) -> None:
        """Note that a ready block came; the present nodes have these `probabilities`, in falling order."""
        now = probabilities[:MAX_REMEMBERED]
        pairs = zip_longest(self.ready_probabilities or now, now, fillvalue=0.0)
        self.ready_probabilities = [old + WEIGHT * (new - old) for old, new in pairs]

    def stepped(self, hit: bool) -> None:
        """Note a step, and whether its bonus token was already a candidate."""
        self.hits += WEIGHT * (hit - self.hits)

    def ran_out(self) -> None:
        """Note that a step begins without the block that was due."""
        self.expired += 1

    def sequential_wait(self) -> float:
        """Seconds after the last verdict that a sequential session waits; each expired wait halves the
        next."""
        return SEQUENTIAL_SECONDS * 0.5**self.expired


def _profit(probabilities: Sequence[float], price: float) -> float:
    return sum(each - price for each in probabilities if each > price)
