"""The queue between the engine thread and a stream."""

from __future__ import annotations

import asyncio
import threading

import pytest

from draft_service.outbox import Outbox
from outrider.errors import Overloaded
from outrider.messages import TokenBlock


def _block(first_id):
    return TokenBlock(first_id, (), (), ())


def _make(bound=4, on_room=lambda: None):
    return Outbox(bound, asyncio.get_running_loop(), on_room)


def test_blocks_put_by_another_thread_arrive_in_order():
    """The event loop gets what the engine put, and then the end."""

    async def scenario():
        outbox = _make(100)

        def work():
            outbox.admit(3)
            for number in range(50):
                outbox.put(_block(number))

        thread = threading.Thread(target=work)
        thread.start()
        assert await outbox.opened() == 3
        received = [(await outbox.get()).first_id for _ in range(50)]
        thread.join()
        outbox.close()
        assert received == list(range(50))
        assert await outbox.get() is None

    asyncio.run(scenario())


def test_reading_from_a_full_outbox_is_told():
    """The engine may expand the session again."""

    async def scenario():
        room = []
        outbox = _make(2, lambda: room.append(True))
        outbox.put(_block(0))
        outbox.put(_block(1))
        assert outbox.full
        await outbox.get()
        await outbox.get()
        assert room == [True]
        assert not outbox.full

    asyncio.run(scenario())


def test_a_refusal_reaches_whoever_waits_for_admission():
    """The first end counts; a later one changes nothing."""

    async def scenario():
        outbox = _make()
        waiting = asyncio.create_task(outbox.opened())
        await asyncio.sleep(0)
        outbox.close(Overloaded("full"))
        outbox.close()
        with pytest.raises(Overloaded):
            await waiting

    asyncio.run(scenario())


def test_an_end_before_admission_is_no_error():
    """The client went away."""

    async def scenario():
        outbox = _make()
        outbox.close()
        assert await outbox.opened() is None

    asyncio.run(scenario())
