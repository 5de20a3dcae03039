"""Compares drafts by how many tokens each foresaw in sessions that had both, and says which to swap. Pure.

A shadow takes the place of one replica of the draft that it beat, so as many drafts are in use as before. All
orchestrators choose the same two replicas, so it does no harm when several decide at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from orchestrator.replicas.pool import Replica
from orchestrator.shadow.foresight import Score
from outrider.recent import Recent

MIN_TOKENS = 4096
"""Tokens of sessions with both drafts that a decision needs. The gain is then known to about 0.01."""
MIN_GAIN = 0.02
"""Least gain in the share of foreseen tokens that is worth a swap."""
MAX_PAIRS = 256


@dataclass(slots=True)
class PairCounts:
    """How many of the same tokens a shadow and a draft in use foresaw."""

    tokens: int = 0
    shadow: int = 0
    serving: int = 0

    @property
    def gain(self) -> float:
        """The shadow's share of foreseen tokens, less that of the draft in use."""
        return (self.shadow - self.serving) / self.tokens if self.tokens else 0.0

    @property
    def won(self) -> bool:
        """True when the shadow is better, and enough tokens were seen to say so."""
        return self.tokens >= MIN_TOKENS and self.gain >= MIN_GAIN


class Comparisons:
    """Counts by versions of shadow and draft in use. Beyond `MAX_PAIRS` the least recent is dropped."""

    def __init__(self) -> None:
        self._counts = Recent[tuple[str, str], PairCounts](MAX_PAIRS)

    def add(self, shadow: str, serving: str, of_shadow: Score, of_serving: Score) -> None:
        """Add the scores of one verdict in a session that has both.

        If the shadow wins, what was counted while the roles were reversed is forgotten: the traffic has
        changed since, and after the swap it would demand the next one.
        """
        counts = self._counts.use((shadow, serving), PairCounts)
        counts.tokens += of_shadow.tokens
        counts.shadow += of_shadow.foreseen
        counts.serving += of_serving.foreseen
        if counts.won:
            self._counts.pop((serving, shadow), None)

    def of(self, shadow: str, serving: str) -> PairCounts:
        """The counts of a pair."""
        return self._counts.get((shadow, serving), PairCounts())


@dataclass(frozen=True, slots=True)
class Swap:
    """A shadow to put into use, and a draft to make a shadow: their endpoints and versions."""

    up: str
    up_version: str
    down: str
    down_version: str
    gain: float
    """See `PairCounts.gain`."""


def swap_of(shadows: Iterable[Replica], serving: Iterable[Replica], comparisons: Comparisons) -> Swap | None:
    """The swap with the largest gain; None when no shadow has won."""
    found = [
        Swap(up, new, down, old, counts.gain)
        for up, new in _named(shadows)
        for down, old in _named(serving)
        if new != old and (counts := comparisons.of(new, old)).won
    ]
    return max(found, key=attrgetter("gain"), default=None)  # the first of equal ones


def _named(replicas: Iterable[Replica]) -> list[tuple[str, str]]:
    """Endpoints and versions, in an order that is the same everywhere."""
    return sorted(
        (replica.endpoint, replica.info.draft_name) for replica in replicas if replica.info is not None
    )
