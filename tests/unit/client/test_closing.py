"""What closing a client does to its calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from outrider.client import AsyncClient, Chunk, Client
from outrider.protocol.errors import Unavailable
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving

CLOSED = "has been closed"


class Endless(FakeOrchestrator):
    """Sends the beginning of a text, and then nothing until the caller goes."""

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        """See the proto."""
        for response in super().Generate(request, context):
            if response.HasField("complete"):
                self.over.wait()
            yield response


@pytest.fixture
def endless() -> Iterator[Endless]:
    """A fake orchestrator whose texts have no end."""
    with serving(Endless()) as (fake, endpoint):
        fake.endpoint = endpoint
        yield fake  # type: ignore[misc]


def test_closing_ends_the_streams_of_other_threads(endless: Endless) -> None:
    """They are cancelled, not resumed."""
    client, begun, raised = Client(endless.endpoint), threading.Event(), []

    def read() -> None:
        try:
            for event in client.stream("count"):
                if isinstance(event, Chunk):
                    begun.set()
        except Unavailable as error:
            raised.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    client.close()
    reader.join(20)
    assert endless.over.wait(20)
    assert (CLOSED in raised[0], len(endless.requests)) == (True, 1)


async def test_closing_ends_the_streams_of_other_tasks(endless: Endless) -> None:
    """With an error, since the tasks themselves are not cancelled."""
    client, begun = AsyncClient(endless.endpoint), asyncio.Event()

    async def read() -> None:
        async for event in client.stream("count"):
            if isinstance(event, Chunk):
                begun.set()

    async with asyncio.timeout(20):
        reader = asyncio.create_task(read())
        await begun.wait()
        await client.close()
        with pytest.raises(Unavailable, match=CLOSED):
            await reader
    assert len(endless.requests) == 1


async def test_a_cancelled_task_stays_cancelled(endless: Endless) -> None:
    """Also if its client is closed at the same time."""
    client = AsyncClient(endless.endpoint)
    endless.answers.clear()
    asking = asyncio.create_task(client.load())
    await asyncio.to_thread(endless.asked.wait)
    asking.cancel()
    await client.close()
    endless.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_closed_client_begins_no_call(endless: Endless) -> None:
    """It says what is wrong."""
    client, waiting = Client(endless.endpoint), AsyncClient(endless.endpoint)
    client.close()
    await waiting.close()
    for call in (client.load, lambda: client.generate("count")):
        with pytest.raises(Unavailable, match=CLOSED):
            call()
    for ask in (waiting.load, lambda: waiting.generate("count")):
        with pytest.raises(Unavailable, match=CLOSED):
            await ask()
    assert not endless.requests
