"""The door: slots, the queue, and what happens to those who wait too long."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from orchestrator.admission import Admission
from outrider.errors import DeadlineExceeded, Overloaded
from tests.unit.orchestrator.rig import run


class Clock:
    """Time as a number."""

    now = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def test_slots_are_given_in_order_of_arrival() -> None:
    """Those who wait get the slots in the order they came."""

    async def scenario() -> None:
        admission, order = Admission(1, 10), []

        async def one(number: int) -> None:
            async with admission.slot(float("inf")):
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*map(one, range(5)))
        assert order == [0, 1, 2, 3, 4]
        assert admission.statistics().running == admission.statistics().queued == 0
        assert admission.statistics().admitted == 5

    run(scenario)


def test_waiting_time_is_reported() -> None:
    """The slot says how long it was waited for."""

    async def scenario() -> None:
        clock = Clock()
        admission = Admission(1, 1, clock)
        async with AsyncExitStack() as stack:
            assert await stack.enter_async_context(admission.slot(200.0)) == 0.0
            waiting = asyncio.create_task(admission.slot(200.0).__aenter__())
            await asyncio.sleep(0)
            clock.now = 103.0
        assert await waiting == 3.0

    run(scenario)


def test_full_queue_refuses_with_a_time() -> None:
    """Beyond the bound a request is refused; it is told to come back after about one departure."""

    async def scenario() -> None:
        clock = Clock()
        admission = Admission(1, 0, clock)
        for _ in range(50):
            async with admission.slot(200.0):
                clock.now += 4.0
            clock.now = 100.0
        async with admission.slot(200.0):
            with pytest.raises(Overloaded) as caught:
                await admission.slot(200.0).__aenter__()
        assert caught.value.retry_after == pytest.approx(4.0, rel=0.01)
        assert admission.statistics().rejected == 1

    run(scenario)


def test_deadline_in_the_past_is_not_queued() -> None:
    """A request that comes too late is told so at once, even when there is room."""

    async def scenario() -> None:
        admission = Admission(1, 1, Clock())
        with pytest.raises(DeadlineExceeded):
            await admission.slot(100.0).__aenter__()
        assert admission.statistics().expired == 1

    run(scenario)


def test_deadline_passes_in_the_queue() -> None:
    """A request whose deadline passes leaves the queue; the next in line is not held up."""

    async def scenario() -> None:
        admission = Admission(1, 5, Clock())
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(admission.slot(200.0))
            with pytest.raises(DeadlineExceeded):
                await admission.slot(100.01).__aenter__()
            assert admission.statistics().queued == 0
        async with admission.slot(200.0):
            assert admission.statistics().running == 1

    run(scenario)


def test_cancelled_waiter_leaves_no_trace() -> None:
    """A client that leaves the queue frees its place, even in the moment in which it got the slot."""

    async def scenario() -> None:
        admission = Admission(1, 5)
        for release_first in (False, True):
            running = admission.slot(float("inf"))
            await running.__aenter__()
            waiting = asyncio.create_task(admission.slot(float("inf")).__aenter__())
            await asyncio.sleep(0)
            if release_first:
                await running.__aexit__(None, None, None)
            waiting.cancel()
            await asyncio.wait({waiting})
            if not release_first:
                await running.__aexit__(None, None, None)
            assert (admission.statistics().running, admission.statistics().queued) == (0, 0)

    run(scenario)


def test_failed_request_frees_its_slot() -> None:
    """However the request ends, the slot is free again."""

    async def scenario() -> None:
        admission = Admission(1, 0)
        with pytest.raises(RuntimeError):
            async with admission.slot(float("inf")):
                raise RuntimeError
        async with admission.slot(float("inf")):
            pass

    run(scenario)
