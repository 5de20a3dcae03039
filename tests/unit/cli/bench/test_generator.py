"""The load generator, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from outrider.cli.bench.arrivals import ArrivalPattern, ClosedLoop, OpenLoop
from outrider.cli.bench.generator import Clock, LoadTally, drive
from outrider.cli.bench.target import Ask, Delivered, Event
from outrider.protocol.errors import Overloaded
from tests.unit.cli.bench.worlds import ScriptedTarget, run_virtual


def asks(count: int) -> list[Ask]:
    """So many requests."""
    return [Ask(index, "x") for index in range(count)]


def driven(load: ArrivalPattern, target: ScriptedTarget, count: int) -> LoadTally:
    """A load to its end."""
    tally = LoadTally()
    run_virtual(lambda clock: drive(load, asks(count), target, tally, clock))
    return tally


def test_times_are_those_of_the_clock() -> None:
    """Sending, every delivery, the end."""
    (outcome,) = driven(ClosedLoop(1), ScriptedTarget([2.0, 1.0]), 1).outcomes
    assert (outcome.sent, outcome.deliveries, outcome.ended) == (0.0, (2.0, 3.0), 3.0)
    assert outcome.end is not None
    assert (outcome.end.output_tokens, outcome.due) == (2, None)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """So many requests run at any time; the next is sent when one ends."""
    target = ScriptedTarget([1.0])
    outcomes = driven(ClosedLoop(2), target, 5).outcomes
    assert target.most_running == 2
    assert [ask.index for ask in target.asked] == [0, 1, 2, 3, 4]
    assert [outcome.sent for outcome in outcomes] == [0.0, 0.0, 1.0, 1.0, 2.0]


def test_more_users_than_requests() -> None:
    """All are sent at once, each once."""
    target = ScriptedTarget([1.0])
    assert len(driven(ClosedLoop(8), target, 3).outcomes) == target.most_running == 3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Requests are sent when they are due, however many are running."""
    target = ScriptedTarget([10.0])
    tally = driven(OpenLoop((0.0, 1.0, 2.5)), target, 3)
    assert [outcome.sent for outcome in tally.outcomes] == [0.0, 1.0, 2.5]
    assert [outcome.late for outcome in tally.outcomes] == [0.0, 0.0, 0.0]
    assert target.most_running == 3


def test_failures_do_not_stop_the_load() -> None:
    """They are outcomes with an error, and the tally counts them."""
    failure = Overloaded("full")
    tally = driven(ClosedLoop(1), ScriptedTarget([1.0], failing={0: failure}), 3)
    assert [outcome.error for outcome in tally.outcomes] == [failure, None, None]
    assert (tally.begun, tally.failed, tally.open) == (3, 1, 0)


class Endless(ScriptedTarget):
    """Stops without an end."""

    async def stream(self, ask: Ask) -> AsyncGenerator[Event, None]:
        """See `BenchTarget`."""
        yield Delivered()


def test_an_answer_without_an_end_has_failed() -> None:
    """What came of it does not count."""
    (outcome,) = driven(ClosedLoop(1), Endless([]), 1).outcomes
    assert "no end" in str(outcome.error)


@pytest.mark.parametrize("load", [ClosedLoop(2), OpenLoop((0.0, 0.0, 0.0))])
def test_an_interrupted_load_leaves_what_has_ended(load: ArrivalPattern) -> None:
    """Requests that run are closed, and show as open."""
    tally, target = LoadTally(), ScriptedTarget([3.0])

    async def interrupted(clock: Clock) -> None:
        running = asyncio.create_task(drive(load, asks(3), target, tally, clock))
        await clock.sleep(4.0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    run_virtual(interrupted)
    assert tally.begun == 3
    assert len(tally.outcomes) == (2 if isinstance(load, ClosedLoop) else 3)
    assert target.running == 0
