"""Compares drafts by how many tokens each foresaw in sessions that had both; says which change places. Pure.

A shadow takes the place of one replica of what it beat: as many drafts are at work as before. All
orchestrators choose the same two, so it does no harm when several find out at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from orchestrator.replicas.pool import Replica
from orchestrator.shadow.foresight import Score

MIN_TOKENS = 4096
"""Of sessions with both drafts, before anything is said: the gain is then known to about a hundredth."""
MIN_GAIN = 0.02
"""Share of all tokens that the better draft foresees more; less is not worth the exchange."""
MAX_PAIRS = 256


@dataclass(slots=True)
class PairCounts:
    """What a shadow and a draft at work foresaw of the same tokens."""

    tokens: int = 0
    shadow: int = 0
    serving: int = 0

    @property
    def gain(self) -> float:
        """Share of the tokens that the shadow foresaw more."""
        return (self.shadow - self.serving) / self.tokens if self.tokens else 0.0

    @property
    def won(self) -> bool:
        """The shadow is better, and enough was seen to say so."""
        return self.tokens >= MIN_TOKENS and self.gain >= MIN_GAIN


class Comparisons:
    """Tallies by the versions of shadow and draft at work; beyond `MAX_PAIRS` the one unused longest goes."""

    def __init__(self) -> None:
        self._tallies: OrderedDict[tuple[str, str], PairCounts] = OrderedDict()

    def add(self, shadow: str, serving: str, of_shadow: Score, of_serving: Score) -> None:
        """A verdict in a session that has both."""
        tally = self._tallies.setdefault((shadow, serving), PairCounts())
        self._tallies.move_to_end((shadow, serving))
        tally.tokens += of_shadow.tokens
        tally.shadow += of_shadow.foreseen
        tally.serving += of_serving.foreseen
        if len(self._tallies) > MAX_PAIRS:
            self._tallies.popitem(last=False)

    def of(self, shadow: str, serving: str) -> PairCounts:
        """What is known of a pair."""
        return self._tallies.get((shadow, serving), PairCounts())


@dataclass(frozen=True, slots=True)
class Swap:
    """A shadow that goes to work, and a draft that becomes one; endpoints, and the versions they have."""

    up: str
    up_version: str
    down: str
    down_version: str
    gain: float
    """Share of the tokens that is foreseen more."""


def swap_of(shadows: Iterable[Replica], serving: Iterable[Replica], comparisons: Comparisons) -> Swap | None:
    """The best exchange that has shown itself; None when none has."""
    found = [
        Swap(up, new, down, old, tally.gain)
        for up, new in _named(shadows)
        for down, old in _named(serving)
        if (tally := comparisons.of(new, old)).won
    ]
    return max(found, key=attrgetter("gain"), default=None)  # of equal ones the first


def _named(replicas: Iterable[Replica]) -> list[tuple[str, str]]:
    """Endpoints and versions, in an order that is the same everywhere."""
    return sorted(
        (replica.endpoint, replica.info.draft_name) for replica in replicas if replica.info is not None
    )
