"""The sessions that a verify replica takes, and the line of those who wait for a place."""

from __future__ import annotations

import asyncio

import pytest

from outrider.protocol.errors import Overloaded
from verify_service.admission import Places


async def line_up(places: Places, *priorities: int) -> tuple[list[asyncio.Task[None]], list[int]]:
    """Waiters in this order; the list has the indexes of those who got their place."""
    served: list[int] = []

    async def wait(index: int, priority: int) -> None:
        await places.take(priority)
        served.append(index)

    tasks = [asyncio.create_task(wait(*waiter)) for waiter in enumerate(priorities)]
    await asyncio.sleep(0)
    return tasks, served


async def test_free_places_go_by_priority_and_arrival() -> None:
    """A place that gets free passes on; when nobody waits it is free."""
    places = Places(4)
    for _ in range(4):
        await places.take(0)
    tasks, served = await line_up(places, 0, 5, 0, 5)
    for _ in range(4):
        places.free()
        await asyncio.sleep(0)
    assert served == [1, 3, 0, 2]
    assert (places.taken, places.waiting) == (4, 0)
    for _ in range(4):
        places.free()
    assert places.taken == 0
    await asyncio.gather(*tasks)


async def test_the_line_is_bounded() -> None:
    """As many may wait as there are places; who leaves the line makes room in it."""
    places = Places(1)
    await places.take(0)
    tasks, _ = await line_up(places, 0)
    with pytest.raises(Overloaded, match="1 sessions are open and 1 wait"):
        await places.take(100)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert places.waiting == 0
    tasks, served = await line_up(places, 0)
    places.free()
    await asyncio.gather(*tasks)
    assert served == [0]


@pytest.mark.parametrize("place_comes_first", [False, True])
async def test_a_place_is_not_lost_with_who_leaves(place_comes_first: bool) -> None:
    """A waiter that is cancelled in the moment in which its place comes passes it on."""
    places = Places(2)
    for _ in range(2):
        await places.take(0)
    (leaving, staying), served = await line_up(places, 1, 0)
    for step in [places.free, leaving.cancel][:: 1 if place_comes_first else -1]:
        step()
    await asyncio.wait({leaving, staying})
    assert (leaving.cancelled(), served, places.taken, places.waiting) == (True, [1], 2, 0)
