"""Who may run now. Each continuation of a request takes a place; there are as many places as verify replicas
have room for sessions. What does not fit waits in a line:

    served next     the highest priority; within it the caller with the fewest continuations ahead, running
                    ones included; then whoever has waited longest since its caller was last served
    kept            the last places, one in `KEPT`, are for callers that have none
    refused         of more than `max_queued` requests that have not begun, the one that would be served last

A request begins with its first place. Its other continuations wait on in the same line, each for a place of
its own, so that `n` may be larger than all places. `Line` decides, without I/O and without a clock;
`Admission` lets requests wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.errors import DeadlineExceeded, Overloaded

KEPT = 16
"""One place in so many is kept for callers without one: a newcomer need not wait for another's long text."""
MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
NEWEST_WEIGHT = 0.2
"""Weight of the newest continuation in the running mean of how long they hold their places."""


@dataclass(slots=True, eq=False)
class Party:
    """The continuations of one request."""

    caller: str
    priority: int
    waiting: int
    """Without a place."""
    running: int = 0
    """With one."""
    came: int = 0
    begun: bool = False
    """It has had a place: it is not refused any more."""


class Line:
    """Decides who gets the next place, and who is one too many."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._parties: list[Party] = []
        """All at the door, in order of arrival."""
        self._running: Counter[str] = Counter()
        """Continuations with a place, by caller."""
        self._served: dict[str, int] = {}
        """When callers were last given a place."""
        self._events = itertools.count()
        """Time, as far as it matters here: which came first."""

    @property
    def running(self) -> int:
        """Continuations with a place."""
        return self._running.total()

    @property
    def begun(self) -> int:
        """Requests that have begun."""
        return sum(party.begun for party in self._parties)

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        return len(self._parties) - self.begun

    def join(self, party: Party) -> None:
        """A request comes to the door."""
        party.came = next(self._events)
        self._parties.append(party)

    def serve(self, capacity: int) -> Party | None:
        """Give a place to the next in line; None when there is none of either."""
        free = capacity - self.running
        order = self._order() if free > 0 else []
        allowed = (party for party in order if free > capacity // KEPT or not self._running[party.caller])
        party = next(allowed, None)
        if party is None:
            return None
        party.waiting -= 1
        party.running += 1
        party.begun = True
        self._served[party.caller] = next(self._events)
        self._running[party.caller] += 1
        return party

    def shorten(self) -> Party | None:
        """Take the last out of a line that is too long; None when it is not."""
        if self.queued <= self._max_queued:
            return None
        party = next(party for party in reversed(self._order()) if not party.begun)
        self._parties.remove(party)
        return party

    def free(self, party: Party) -> None:
        """One of its continuations has ended."""
        party.running -= 1
        self._running[party.caller] -= 1

    def leave(self, party: Party) -> None:
        """The request has ended, however it did: what it holds is free; idempotent."""
        if party in self._parties:
            self._parties.remove(party)
        self._running[party.caller] -= party.running
        party.running = party.waiting = 0
        if all(other.caller != party.caller for other in self._parties):
            self._running.pop(party.caller, None)
            self._served.pop(party.caller, None)

    def _order(self) -> list[Party]:
        """Those who wait, as they are served if nobody comes or leaves."""
        ahead = self._running.copy()
        ranks = {}
        for party in sorted(self._parties, key=lambda party: -party.priority):
            since = max(party.came, self._served.get(party.caller, 0))
            ranks[party] = (-party.priority, ahead[party.caller], since)
            ahead[party.caller] += party.waiting
        return sorted((party for party in ranks if party.waiting), key=lambda party: ranks[party])


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Requests now."""

    running: int
    """That have begun."""
    queued: int
    """That have not."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request at the door, and the places that are given to it."""

    party: Party
    arrived: float
    begins: asyncio.Future[None]
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    waited: float = 0.0
    """Seconds until the first place."""


class Admission:
    """The door of the orchestrator. Times are those of `clock`, in seconds."""

    def __init__(
        self, max_queued: int, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`capacity` says how many continuations may run; `look` when it may have grown."""
        self._line = Line(max_queued)
        self._capacity = capacity
        self._clock = clock
        self._turns: dict[Party, Turn] = {}
        self._mean_seconds = 1.0

    def statistics(self) -> AdmissionStatistics:
        """Counts."""
        return AdmissionStatistics(self._line.begun, self._line.queued)

    def look(self) -> None:
        """Give away the places that are free."""
        while (party := self._line.serve(self._capacity())) is not None:
            turn = self._turns[party]
            turn.places.release()
            if not turn.begins.done():
                turn.begins.set_result(None)

    @asynccontextmanager
    async def enter(
        self, caller: str, priority: int, continuations: int, deadline: float
    ) -> AsyncIterator[Turn]:
        """Wait until the first continuation of a request has a place; whatever it holds is free at the end.

        Raises:
            Overloaded: the line is full; `retry_after` is about when there will be room.
            DeadlineExceeded: `deadline` passed before there was a place.
        """
        party = Party(caller, priority, continuations)
        turn = Turn(party, self._clock(), asyncio.get_running_loop().create_future())
        if deadline <= turn.arrived:
            raise _expired()
        self._turns[party] = turn
        self._line.join(party)
        try:
            self.look()
            self._shorten()
            await _begin(turn, deadline - turn.arrived)
            turn.waited = self._clock() - turn.arrived
            yield turn
        finally:
            del self._turns[party]
            self._line.leave(party)
            self.look()

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[float]:
        """Run one continuation in a place of its request; gives the seconds from arrival until it had it."""
        await turn.places.acquire()
        began = self._clock()
        try:
            yield began - turn.arrived
        finally:
            self._mean_seconds += NEWEST_WEIGHT * (self._clock() - began - self._mean_seconds)
            self._line.free(turn.party)
            self.look()

    def _shorten(self) -> None:
        refused = self._line.shorten()
        if refused is None or (begins := self._turns[refused].begins).done():  # done: it is about to leave
            return
        message = f"{self._line.begun} requests run and {self._line.queued} wait; try again later"
        begins.set_exception(Overloaded(message, self._retry_after()))

    def _retry_after(self) -> float:
        """About how long until the line has room: one departure."""
        expected = self._mean_seconds / max(1, self._capacity())
        return min(max(expected, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


async def _begin(turn: Turn, remaining: float) -> None:
    try:
        async with asyncio.timeout(remaining):
            await turn.begins
    except TimeoutError:
        raise _expired() from None


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed while the request waited for its turn")
