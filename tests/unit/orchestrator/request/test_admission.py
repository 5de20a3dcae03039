"""The door: places, the line, and what happens to those who wait too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from orchestrator.request.admission import Admission, AdmissionQueue, QueueEntry, Waiter
from outrider.protocol.errors import DeadlineExceeded, Overloaded
from tests.clock import Clock

FOREVER = float("inf")


def join(line: AdmissionQueue, caller: str, n: int = 1, priority: int = 0) -> QueueEntry:
    """A request comes to the line."""
    entry = QueueEntry(caller, priority, n)
    line.join(entry)
    return entry


def serve(line: AdmissionQueue, capacity: int) -> str:
    """Callers of those that get places until none is free."""
    served = ""
    while (entry := line.serve(capacity)) is not None:
        served += entry.caller
    return served


def test_continuations_are_counted_and_callers_take_turns() -> None:
    """Five places hold five continuations, however many requests they belong to, shared by the callers."""
    line = AdmissionQueue(10)
    join(line, "a", 4)
    join(line, "b", 4)
    assert serve(line, 5) == "ababa"
    assert (line.running, line.begun, line.queued) == (5, 2, 0)
    assert serve(line, 5) == ""


def test_four_large_requests_do_not_starve_a_small_one() -> None:
    """One caller wants more than there is: four of 64 places are kept for others, who have them at once; then
    another caller has the next place that gets free."""
    line = AdmissionQueue(10)
    large = [join(line, "a", 16) for _ in range(5)]
    assert serve(line, 64) == "a" * 60
    for caller in "bcde":
        join(line, caller, 2)
        assert serve(line, 64) == caller
    join(line, "f")
    assert serve(line, 64) == ""
    line.free(large[0])
    assert serve(line, 64) == "f"


def test_callers_without_a_place_take_turns() -> None:
    """Where there are more callers than places nobody is served twice before those who waited before that."""
    line = AdmissionQueue(10)
    parties = {caller: join(line, caller, 3) for caller in "abc"}
    served = serve(line, 1)
    for _ in range(5):
        line.free(parties[served[-1]])
        served += serve(line, 1)
    parties["d"] = join(line, "d", 2)
    for _ in range(5):
        line.free(parties[served[-1]])
        served += serve(line, 1)
    assert served == "abcabc" + "abcdd"


def test_places_go_by_priority() -> None:
    """Higher first, whoever asks and in whatever order they came; among equals who came first."""
    line = AdmissionQueue(10)
    large = join(line, "z", 16, priority=-1)
    assert serve(line, 4) == "zzzz"
    for caller, priority in (("a", 0), ("b", 100), ("c", 5), ("d", 100)):
        join(line, caller, 1, priority)
    served = ""
    for _ in range(4):
        line.free(large)
        served += serve(line, 4)
    assert served == "bdca"


def test_requests_of_one_caller_are_served_in_order() -> None:
    """The first one gets all its places before the next gets one."""
    line = AdmissionQueue(10)
    parties = [join(line, "a", 2) for _ in range(3)]
    assert serve(line, 3) == "aaa"
    assert [entry.running for entry in parties] == [2, 1, 0]


def test_more_continuations_than_places_run_in_turns() -> None:
    """A request with n = 3 goes through one place, also when that was taken away meanwhile."""
    line = AdmissionQueue(10)
    entry = join(line, "a", 3)
    for _ in range(3):
        assert (serve(line, 1), serve(line, 0)) == ("a", "")
        line.free(entry)
    assert serve(line, 1) == ""


def test_who_is_served_last_is_refused() -> None:
    """A caller that fills the line keeps no other one out, and a request that has begun is safe."""
    line = AdmissionQueue(2)
    begun = join(line, "a", 3)
    serve(line, 1)
    first, last = join(line, "a"), join(line, "a")
    assert line.shorten() is None
    other = join(line, "b")
    assert line.shorten() is last
    assert line.shorten() is None
    urgent = join(line, "a", priority=1)
    assert line.shorten() is first
    lowest = join(line, "c", priority=-1)
    assert line.shorten() is lowest
    line.leave(urgent)
    line.leave(begun)
    assert serve(line, 5) == other.caller


def test_nothing_is_left_of_any_history() -> None:
    """Whatever comes, ends and goes: no place is given twice, none lies idle, none is lost."""
    draw, line, parties = random.Random(3), AdmissionQueue(5), list[QueueEntry]()
    for _ in range(3000):
        match draw.randrange(4):
            case 0:
                parties.append(join(line, draw.choice("abc"), draw.randint(1, 4), draw.randint(-1, 1)))
                serve(line, 6)
                if (refused := line.shorten()) is not None:
                    parties.remove(refused)
            case 1 | 2 if running := [entry for entry in parties if entry.running]:
                line.free(draw.choice(running))
            case 3 if parties:
                line.leave(parties.pop(draw.randrange(len(parties))))
        serve(line, 6)
        assert line.running == sum(entry.running for entry in parties) <= 6
        assert line.running == 6 or not any(entry.waiting for entry in parties)
        assert line.queued <= 5
    for entry in parties * 2:
        line.leave(entry)
    assert (line.running, line.begun, line.queued) == (0, 0, 0)


async def enter(admission: Admission, n: int = 1, deadline: float = FOREVER) -> tuple[AsyncExitStack, Waiter]:
    """A request that has begun; it ends with the stack."""
    stack = AsyncExitStack()
    return stack, await stack.enter_async_context(admission.enter("a", 0, n, deadline))


def counts(admission: Admission) -> tuple[int, int]:
    """Running and queued requests."""
    return admission.queue.begun, admission.queue.queued


async def test_waiting_time_is_reported() -> None:
    """The request says how long it waited for its first place, each continuation how long for its own."""
    clock = Clock()
    admission = Admission(1, lambda: 1, clock)
    first, waiter = await enter(admission)
    assert waiter.waited == 0.0
    waiting = asyncio.create_task(enter(admission, 2))
    await asyncio.sleep(0)
    clock.now = 103.0
    await first.aclose()
    stack, waiter = await waiting
    assert waiter.waited == 3.0
    for expected in (3.0, 7.0):
        async with admission.place(waiter) as waited:
            assert waited == expected
            clock.now = 107.0
    await stack.aclose()


async def test_full_line_refuses_with_a_time() -> None:
    """Beyond the bound a request is refused; it is told to come back after about one departure."""
    clock = Clock()
    admission = Admission(0, lambda: 2, clock)
    for _ in range(50):
        stack, waiter = await enter(admission)
        async with admission.place(waiter):
            clock.now += 4.0
        await stack.aclose()
    stack, _ = await enter(admission, 2)
    with pytest.raises(Overloaded, match="1 requests run and 0 wait") as caught:
        await enter(admission)
    assert caught.value.retry_after == pytest.approx(2.0, rel=0.01)
    await stack.aclose()
    assert counts(admission) == (0, 0)


async def test_a_refused_request_makes_room_for_another_caller() -> None:
    """One that waited already may be refused in favour of one that is served before it."""
    admission = Admission(1, lambda: 1)
    stack, _ = await enter(admission)
    waiting = asyncio.create_task(enter(admission))
    await asyncio.sleep(0)
    other = asyncio.create_task(admission.enter("b", 0, 1, FOREVER).__aenter__())
    with pytest.raises(Overloaded):
        await waiting
    await stack.aclose()
    assert (await other).entry.caller == "b"


async def test_new_places_are_given_at_once() -> None:
    """When verify replicas come, those who wait begin with the next look."""
    places = [0]
    admission = Admission(5, lambda: places[0])
    waiting = asyncio.create_task(enter(admission))
    await asyncio.sleep(0)
    assert counts(admission) == (0, 1)
    places[0] = 1
    admission.give_places()
    assert counts(admission) == (1, 0)
    await (await waiting)[0].aclose()


async def test_deadline_in_the_past_is_not_queued() -> None:
    """A request that comes too late is told so at once, even when there is room."""
    admission = Admission(1, lambda: 1, Clock())
    with pytest.raises(DeadlineExceeded):
        await enter(admission, deadline=100.0)
    assert counts(admission) == (0, 0)


async def test_deadline_passes_in_the_line() -> None:
    """A request whose deadline passes leaves the line; the next one is not held up."""
    admission = Admission(5, lambda: 1, Clock())
    stack, _ = await enter(admission)
    with pytest.raises(DeadlineExceeded):
        await enter(admission, deadline=100.01)
    assert counts(admission) == (1, 0)
    await stack.aclose()
    await (await enter(admission))[0].aclose()


@pytest.mark.parametrize("place_comes_first", [False, True])
async def test_cancelled_waiter_leaves_no_trace(place_comes_first: bool) -> None:
    """A client that leaves the line is gone at once, even in the moment in which it got a place."""
    admission = Admission(5, lambda: 1)
    stack, _ = await enter(admission)
    waiting = asyncio.create_task(enter(admission))
    await asyncio.sleep(0)
    steps: list[Callable[[], Awaitable[object]]] = [
        lambda: cancel(waiting),
        lambda: stack.aclose(),
    ]
    for step in reversed(steps) if place_comes_first else steps:
        await step()
    assert counts(admission) == (0, 0)
    await (await enter(admission))[0].aclose()


async def cancel(task: asyncio.Task[object]) -> None:
    """Cancel a task, and let it end."""
    task.cancel()
    await asyncio.wait({task})


async def test_cancelled_continuations_free_their_places() -> None:
    """One that runs and one that waits: both places go to others, and the request's end frees none twice."""
    admission = Admission(5, lambda: 1)
    stack, waiter = await enter(admission, 3)

    async def hold() -> None:
        async with admission.place(waiter):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold()) for _ in range(2)]
    await asyncio.sleep(0)
    other = asyncio.create_task(enter(admission))
    await asyncio.sleep(0)
    for task in tasks:
        await cancel(task)
    await stack.aclose()
    assert counts(admission) == (1, 0)
    await (await other)[0].aclose()
    assert counts(admission) == (0, 0)


async def test_failed_request_frees_its_places() -> None:
    """However the request ends, its places are free again."""
    admission = Admission(0, lambda: 4)
    with pytest.raises(RuntimeError):
        async with admission.enter("a", 0, 4, FOREVER):
            raise RuntimeError
    async with admission.enter("a", 0, 4, FOREVER):
        assert counts(admission) == (1, 0)
