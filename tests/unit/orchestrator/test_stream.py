"""One stream to a replica: how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from orchestrator.stream import ReplicaStream
from outrider.errors import Unavailable


class FakeCall:
    """A call whose messages come from a queue; cancelling it ends the read that waits, as gRPC does."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[object] = asyncio.Queue()
        self.written = asyncio.Event()
        self.reads_cancelled = 0

    async def read(self) -> object:
        """The next message."""
        try:
            return await self.messages.get()
        except asyncio.CancelledError:
            self.reads_cancelled += 1
            raise

    async def wait_for_connection(self) -> None:
        """It is there."""

    async def write(self, message: object) -> None:
        """Note that one was written."""
        self.written.set()

    async def done_writing(self) -> None:
        """Nothing follows."""

    def cancel(self) -> None:
        """End the call."""
        self.messages.put_nowait(grpc.aio.EOF)


async def ignore(message: Any) -> None:
    """Take a message."""


async def begun(receive: Callable[[Any], Awaitable[None]]) -> tuple[FakeCall, asyncio.Task[None]]:
    """A call, and the stream that runs over it and waits for a message."""
    call, stream = FakeCall(), ReplicaStream[str, str]("open")
    running = asyncio.create_task(stream.run(call, receive))  # type: ignore[arg-type]
    await call.written.wait()
    return call, running


def test_a_read_that_waits_is_ended_by_its_call() -> None:
    """When the stream is cancelled, the call is; grpc.aio would not free what a cancelled read holds."""

    async def scenario() -> None:
        call, running = await begun(ignore)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert call.reads_cancelled == 0

    asyncio.run(scenario())


def test_who_cannot_hand_a_message_on_is_told() -> None:
    """A reader that waits for room in the session's queue would wait for ever."""

    async def scenario() -> None:
        handed = asyncio.Event()

        async def full(message: Any) -> None:
            handed.set()
            await asyncio.Event().wait()

        call, running = await begun(full)
        call.messages.put_nowait("block")
        await handed.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_an_aborted_stream_says_why() -> None:
    """The error that it was aborted with, before it has begun and while it runs."""

    async def scenario() -> None:
        stream = ReplicaStream[str, str]("open")
        stream.abort(Unavailable("gone"))
        with pytest.raises(Unavailable, match="gone"):
            await stream.run(FakeCall(), ignore)  # type: ignore[arg-type]
        stream = ReplicaStream[str, str]("open")
        running = asyncio.create_task(stream.run(FakeCall(), ignore))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stream.abort(Unavailable("lost"))
        with pytest.raises(Unavailable, match="lost"):
            await running

    asyncio.run(scenario())
