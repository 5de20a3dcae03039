"""One stream to a replica: how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from orchestrator.replicas import stream as stream_module
from orchestrator.replicas.stream import ReplicaStream
from outrider.protocol.errors import Overloaded, Unavailable


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end by itself is not cancelled before a test gives up."""
    monkeypatch.setattr(stream_module, "END_SECONDS", 3600.0)


class FakeCall:
    """A call whose messages come from a queue; cancelling it ends what waits, as gRPC does."""

    def __init__(self, slow: bool = False) -> None:
        self.messages: asyncio.Queue[object] = asyncio.Queue()
        self.written = asyncio.Event()
        self.over = asyncio.Event()
        self.cancelled: list[str] = []
        """Operations whose awaiter was cancelled."""
        self._slow = slow
        self._status = (grpc.StatusCode.OK, "")
        self._on_end: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called whenever the call has a status."""
        self._on_end.append(callback)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The call has this status now."""
        self._status = code, details
        for callback in self._on_end:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        """Of the status."""
        return self._status[0]

    async def details(self) -> str:
        """Of the status."""
        return self._status[1]

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """There is none."""
        return grpc.aio.Metadata()

    async def read(self) -> object:
        """The next message."""
        try:
            message = await self.messages.get()
        except asyncio.CancelledError:
            self.cancelled.append("read")
            raise
        if message is grpc.aio.EOF and self._status[0] is not grpc.StatusCode.OK:
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(self._status[0], none, none, self._status[1])
        return message

    async def wait_for_connection(self) -> None:
        """It is there."""

    async def write(self, message: object) -> None:
        """Note that one was written; a slow one is on its way until the call is over."""
        self.written.set()
        try:
            await (self.over.wait() if self._slow else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled.append("write")
            raise

    async def done_writing(self) -> None:
        """Nothing follows."""

    def cancel(self) -> None:
        """End the call."""
        self.over.set()
        self.messages.put_nowait(grpc.aio.EOF)


async def ignore(message: Any) -> None:
    """Take a message."""


async def begun(
    receive: Callable[[Any], Awaitable[None]], slow: bool = False
) -> tuple[FakeCall, asyncio.Task[None]]:
    """A call, and the stream that runs over it and waits for a message."""
    call, stream = FakeCall(slow), ReplicaStream[str, str]("open")
    running = asyncio.create_task(stream.run(call, receive))  # type: ignore[arg-type]
    await call.written.wait()
    return call, running


async def ended(running: asyncio.Task[None]) -> None:
    """Cancel a stream and see it end."""
    running.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("slow", [False, True])
async def test_a_read_and_a_write_that_wait_are_ended_by_their_call(slow: bool) -> None:
    """When the stream is cancelled, the call is; grpc.aio would not free what cancelled ones hold."""
    call, running = await begun(ignore, slow)
    await ended(running)
    assert not call.cancelled


async def test_who_cannot_hand_a_message_on_is_told() -> None:
    """A reader that waits for room in the session's queue would wait for ever."""
    handed = asyncio.Event()

    async def full(message: Any) -> None:
        handed.set()
        await asyncio.Event().wait()

    call, running = await begun(full)
    call.messages.put_nowait("block")
    await handed.wait()
    await ended(running)


async def test_an_aborted_stream_says_why() -> None:
    """The error that it was aborted with, before it has begun and while it runs."""
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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK])
async def test_a_write_that_fails_at_the_end_does_not_hide_the_reason(
    code: grpc.StatusCode, late: bool
) -> None:
    """grpc.aio puts a status of its own in place of the replica's, just before or after that comes."""
    call, running = await begun(ignore)
    own = (grpc.StatusCode.INTERNAL, "Internal error from Core")
    call.end(*(own if late else (code, "full")))
    call.end(*own)
    call.messages.put_nowait(grpc.aio.EOF)
    if late:
        await call.over.wait()
        call.end(code, "full")
    if code is grpc.StatusCode.OK:
        await running
    else:
        with pytest.raises(Overloaded, match="full"):
            await running
