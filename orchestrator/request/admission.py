"""Decides which requests may run now. Each continuation of a request needs a place; there are as many places
as verify replicas have room for sessions. Continuations without a place wait in a queue:

    served next     the highest priority; within it the caller with the fewest continuations, running or ahead
                    in the queue; then the one that has waited longest since its caller was served
    reserved        one place in `PLACES_PER_RESERVED` is for callers that have no place
    refused         when more than `max_queued` requests have not begun: the one that would be served last

A request begins with its first place. Its other continuations wait in the same queue, each for a place of its
own, so `n` may be larger than the number of places. `AdmissionQueue` decides, without I/O and without a
clock; `Admission` makes requests wait for its decisions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.protocol.errors import DeadlineExceeded, Overloaded
from outrider.rpc.unread import within

PLACES_PER_RESERVED = 16
"""Number of places of which one is reserved for callers without a place, who then need not wait for others'
long texts."""
MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
NEWEST_WEIGHT = 0.2
"""Weight of the newest continuation in the running mean of how long continuations keep their places."""
EXPIRED = "the deadline passed while the request waited for its turn; raise the timeout"


@dataclass(slots=True, eq=False)
class QueueEntry:
    """The continuations of one request."""

    caller: str
    priority: int
    waiting: int
    """Continuations without a place."""
    running: int = 0
    """Continuations with a place."""
    came: int = 0
    """Number of the event of its arrival, among all events of the queue."""
    begun: bool = False
    """True once it has had a place. It cannot be refused then."""


class AdmissionQueue:
    """Decides who gets the next place, and who is refused."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._entries: list[QueueEntry] = []
        """All requests, in order of arrival."""
        self._running: Counter[str] = Counter()
        """Continuations with a place, by caller."""
        self._served: dict[str, int] = {}
        """Number of the event by which a caller last got a place, by caller."""
        self._events = itertools.count()
        """Counts the events: arrivals, and places given."""

    @property
    def running(self) -> int:
        """Continuations with a place."""
        return self._running.total()

    @property
    def begun(self) -> int:
        """Requests that have begun."""
        return sum(entry.begun for entry in self._entries)

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        return len(self._entries) - self.begun

    def join(self, entry: QueueEntry) -> None:
        """A request arrives."""
        entry.came = next(self._events)
        self._entries.append(entry)

    def serve(self, capacity: int) -> QueueEntry | None:
        """Give a place to the next in the queue; None when no place is free or nothing waits for one."""
        free = capacity - self.running
        order = self._order() if free > 0 else []
        allowed = (
            entry
            for entry in order
            if free > capacity // PLACES_PER_RESERVED or not self._running[entry.caller]
        )
        entry = next(allowed, None)
        if entry is None:
            return None
        entry.waiting -= 1
        entry.running += 1
        entry.begun = True
        self._served[entry.caller] = next(self._events)
        self._running[entry.caller] += 1
        return entry

    def shorten(self) -> QueueEntry | None:
        """Remove the request that would be served last if the queue is too long; None when it is not."""
        if self.queued <= self._max_queued:
            return None
        entry = next(entry for entry in reversed(self._order()) if not entry.begun)
        self._entries.remove(entry)
        return entry

    def free(self, entry: QueueEntry) -> None:
        """One of the request's continuations has ended."""
        entry.running -= 1
        self._running[entry.caller] -= 1

    def leave(self, entry: QueueEntry) -> None:
        """The request has ended: free its places. May be called twice."""
        if entry in self._entries:
            self._entries.remove(entry)
        self._running[entry.caller] -= entry.running
        entry.running = entry.waiting = 0
        if all(other.caller != entry.caller for other in self._entries):
            self._running.pop(entry.caller, None)
            self._served.pop(entry.caller, None)

    def _order(self) -> list[QueueEntry]:
        """The waiting requests in the order in which they would be served if none came or left."""
        ahead = self._running.copy()
        ranks = {}
        for entry in sorted(self._entries, key=lambda entry: -entry.priority):
            since = max(entry.came, self._served.get(entry.caller, 0))
            ranks[entry] = (-entry.priority, ahead[entry.caller], since)
            ahead[entry.caller] += entry.waiting
        return sorted((entry for entry in ranks if entry.waiting), key=lambda entry: ranks[entry])


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that waits, and the places that are given to it."""

    entry: QueueEntry
    arrived: float
    begins: asyncio.Future[None]
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    waited: float = 0.0
    """Seconds until the first place."""


class Admission:
    """Lets requests run, or makes them wait. Times are those of `clock`, in seconds."""

    def __init__(
        self, max_queued: int, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`capacity` says how many continuations may run. Call `give_places` when it may have grown."""
        self.queue = AdmissionQueue(max_queued)
        self._capacity = capacity
        self._clock = clock
        self._waiters: dict[QueueEntry, Waiter] = {}
        self._mean_seconds = 1.0

    def give_places(self) -> None:
        """Give free places to requests that wait."""
        while (entry := self.queue.serve(self._capacity())) is not None:
            waiter = self._waiters[entry]
            waiter.places.release()
            if not waiter.begins.done():
                waiter.begins.set_result(None)

    @asynccontextmanager
    async def enter(
        self, caller: str, priority: int, continuations: int, deadline: float
    ) -> AsyncIterator[Waiter]:
        """Wait until the first continuation of a request has a place. Leaving the context frees its places.

        Raises:
            Overloaded: the queue is full; `retry_after` is about when there will be room, in seconds.
            DeadlineExceeded: `deadline` passed before there was a place.
        """
        entry = QueueEntry(caller, priority, continuations)
        waiter = Waiter(entry, self._clock(), asyncio.get_running_loop().create_future())
        if deadline <= waiter.arrived:
            raise DeadlineExceeded(EXPIRED)
        self._waiters[entry] = waiter
        self.queue.join(entry)
        try:
            self.give_places()
            self._shorten()
            async with within(deadline - waiter.arrived, EXPIRED):
                await waiter.begins
            waiter.waited = self._clock() - waiter.arrived
            yield waiter
        finally:
            del self._waiters[entry]
            self.queue.leave(entry)
            self.give_places()

    @asynccontextmanager
    async def place(self, waiter: Waiter) -> AsyncIterator[float]:
        """Run one continuation in a place of its request; yield the seconds that it waited since arrival."""
        await waiter.places.acquire()
        began = self._clock()
        try:
            yield began - waiter.arrived
        finally:
            self._mean_seconds += NEWEST_WEIGHT * (self._clock() - began - self._mean_seconds)
            self.queue.free(waiter.entry)
            self.give_places()

    def _shorten(self) -> None:
        refused = self.queue.shorten()
        if refused is None or (begins := self._waiters[refused].begins).done():  # done: about to leave
            return
        message = f"{self.queue.begun} requests run and {self.queue.queued} wait; try again later"
        begins.set_exception(Overloaded(message, self._retry_after()))

    def _retry_after(self) -> float:
        """About how many seconds pass until the next request leaves."""
        expected = self._mean_seconds / max(1, self._capacity())
        return min(max(expected, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
