"""Who may run now: at most `max_running` requests; `max_queued` more wait in order, the rest is refused."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from outrider.errors import DeadlineExceeded, Overloaded

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
NEWEST_WEIGHT = 0.2
"""Weight of the newest request in the running mean of how long requests run."""


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Requests now, and since the start."""

    running: int
    queued: int
    admitted: int
    rejected: int
    expired: int


class Admission:
    """The door of the orchestrator. Times are those of `clock`, in seconds."""

    def __init__(
        self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._clock = clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self._running = self._admitted = self._rejected = self._expired = 0
        self._mean_seconds = 1.0

    def statistics(self) -> AdmissionStatistics:
        """Counts."""
        return AdmissionStatistics(
            self._running, len(self._queue), self._admitted, self._rejected, self._expired
        )

    @asynccontextmanager
    async def slot(self, deadline: float) -> AsyncIterator[float]:
        """Hold one of the running slots; gives the seconds that were spent waiting for it.

        Raises:
            Overloaded: the queue is full; `retry_after` is about when there will be room.
            DeadlineExceeded: `deadline` passed before there was a slot.
        """
        arrived = self._clock()
        await self._enter(deadline - arrived)
        began = self._clock()
        try:
            yield began - arrived
        finally:
            self._mean_seconds += NEWEST_WEIGHT * (self._clock() - began - self._mean_seconds)
            self._leave()

    async def _enter(self, remaining: float) -> None:
        if remaining <= 0.0:
            raise self._expire()
        if self._running < self._max_running and not self._queue:
            self._running += 1
            self._admitted += 1
            return
        if len(self._queue) >= self._max_queued:
            self._rejected += 1
            raise Overloaded(
                f"{self._running} requests run and {len(self._queue)} wait; try again later",
                self._retry_after(),
            )
        await self._wait(remaining)

    async def _wait(self, remaining: float) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(remaining):
                await turn
        except BaseException as error:
            self._give_up(turn)
            if isinstance(error, TimeoutError):
                raise self._expire() from None
            raise
        self._admitted += 1

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        """A waiter leaves: its place in the queue, or the slot that it was given in the same moment."""
        if turn in self._queue:
            self._queue.remove(turn)
        elif turn.done() and not turn.cancelled():
            self._leave()

    def _leave(self) -> None:
        """Free a slot: the longest waiting request takes it over."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    def _expire(self) -> DeadlineExceeded:
        self._expired += 1
        return DeadlineExceeded("the deadline passed while the request waited for its turn")

    def _retry_after(self) -> float:
        """About how long until the queue has room: one departure."""
        expected = self._mean_seconds / self._max_running
        return min(max(expected, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
