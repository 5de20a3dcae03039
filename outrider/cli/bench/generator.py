"""The load generator: sends requests when they are due and records their outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import assert_never

from outrider.cli.bench.arrivals import ArrivalPattern, ClosedLoop, OpenLoop
from outrider.cli.bench.outcomes import RequestOutcome
from outrider.cli.bench.target import Ask, BenchTarget, Delivered, Ended
from outrider.protocol.errors import OutriderError, Unavailable


@dataclass(frozen=True, slots=True)
class Clock:
    """Tells the time and waits, both in seconds."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


@dataclass(slots=True)
class LoadTally:
    """The requests of a load so far; correct at any time, also when the load is interrupted."""

    begun: int = 0
    outcomes: list[RequestOutcome] = field(default_factory=list)
    """Outcomes in the order in which the requests ended."""

    @property
    def open(self) -> int:
        """Requests that have begun and not ended."""
        return self.begun - len(self.outcomes)

    @property
    def failed(self) -> int:
        """Requests that ended with an error."""
        return sum(outcome.error is not None for outcome in self.outcomes)


async def drive(
    load: ArrivalPattern, asks: Sequence[Ask], target: BenchTarget, tally: LoadTally, clock: Clock
) -> None:
    """Send all requests of a load and wait for the last; failed requests are recorded as outcomes too."""
    match load:
        case ClosedLoop():
            await _drive_closed(load, asks, target, tally, clock)
        case OpenLoop():
            await _drive_open(load, asks, target, tally, clock)
        case _:
            assert_never(load)


async def _drive_closed(
    load: ClosedLoop, asks: Sequence[Ask], target: BenchTarget, tally: LoadTally, clock: Clock
) -> None:
    left = iter(asks)

    async def user() -> None:
        for ask in left:
            await _send(ask, None, target, tally, clock)

    async with asyncio.TaskGroup() as users:
        for _ in range(min(load.concurrency, len(asks))):
            users.create_task(user())


async def _drive_open(
    load: OpenLoop, asks: Sequence[Ask], target: BenchTarget, tally: LoadTally, clock: Clock
) -> None:
    start = clock.now()
    async with asyncio.TaskGroup() as users:
        for ask, offset in zip(asks, load.offsets, strict=True):
            due = start + offset
            if (wait := due - clock.now()) > 0:
                await clock.sleep(wait)
            users.create_task(_send(ask, due, target, tally, clock))


async def _send(ask: Ask, due: float | None, target: BenchTarget, tally: LoadTally, clock: Clock) -> None:
    tally.begun += 1
    sent, deliveries = clock.now(), list[float]()
    end: Ended | None = None
    error: OutriderError | None = None
    try:
        async with aclosing(target.stream(ask)) as events:
            async for event in events:
                match event:
                    case Delivered():
                        deliveries.append(clock.now())
                    case Ended():
                        end = event
    except OutriderError as failure:
        error = failure
    if end is None and error is None:
        error = Unavailable("the answer had no end")
    outcome = RequestOutcome(
        index=ask.index,
        sent=sent,
        ended=clock.now(),
        due=due,
        deliveries=tuple(deliveries),
        end=end,
        error=error,
    )
    tally.outcomes.append(outcome)
