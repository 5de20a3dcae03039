"""How busy this orchestrator is, for a balancer in front of several."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.replicas.pool import Replica
from orchestrator.request.admission import AdmissionStatistics

WINDOW_SECONDS = 10
"""Over which tokens are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What `GetLoad` answers; the names are those of its fields."""

    running: int
    waiting: int
    places: int
    free_places: int
    pages: int
    pages_free: int
    verify_replicas: int
    draft_replicas: int
    tokens_per_second: float


def load_of(
    admission: AdmissionStatistics,
    places: int,
    verify: Iterable[Replica],
    draft_replicas: int,
    tokens_per_second: float,
) -> Load:
    """The load, from the replicas that can be used now."""
    infos = [replica.info for replica in verify if replica.info is not None]
    return Load(
        running=admission.running,
        waiting=admission.queued,
        places=places,
        free_places=max(places - admission.continuations, 0),
        pages=sum(info.pages for info in infos),
        pages_free=sum(info.pages_free for info in infos),
        verify_replicas=len(infos),
        draft_replicas=draft_replicas,
        tokens_per_second=tokens_per_second,
    )


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
