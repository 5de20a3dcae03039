"""Chooses the draft replica that a better shadow changes places with. Pure.

One shadow for one replica of what it beat: there are as many drafts at work as before. All orchestrators
choose the same two, so it does no harm when several find out at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from orchestrator.replicas.pool import Replica
from orchestrator.shadow.comparison import Comparisons


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
