"""One bidirectional stream to a replica: a bounded outbox, a reader, and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast

import grpc

from outrider.protocol.allowance import BLOCKS, LATE
from outrider.protocol.errors import InternalError, InvalidRequest, OutriderError, Unavailable
from outrider.rpc.channels import Ending, parsed

CLOSE_SECONDS = 0.5
"""Longest time for a replica to end its stream after our side has ended. Then the call is cancelled."""
END_SECONDS = 1.0
"""Longest time for the last read and write of a cancelled call."""
MAX_UNSENT = 2 * LATE * BLOCKS
"""Most messages that wait for a replica to read them. A replica that lets more pile up is given up. Between
two of its verdicts a verify replica is sent at most half of this, so blocks cannot end its stream."""

Out = TypeVar("Out")
In = TypeVar("In")


class ReplicaStream(Generic[Out, In]):
    """Messages of type Out go to a replica in order, messages of type In come back.

    `send` never waits; the call may not be open yet. `run` opens it and returns when the replica has ended
    the stream.

    A read or write of the call is never cancelled while it waits, because grpc.aio would not free its memory
    (github.com/grpc/grpc/issues/43360). The call is cancelled instead, and they end with it.
    """

    def __init__(self, first: Out) -> None:
        self._outbox: asyncio.Queue[Out | None] = asyncio.Queue(MAX_UNSENT)
        self._outbox.put_nowait(first)
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._aborted: OutriderError | None = None
        self._receiving = False
        """True while a message that was read is being handed on."""
        self._sending = False
        """True while a message is being written to the call."""
        self._ended = False

    def send(self, message: Out | None) -> None:
        """Queue a message, or None to end our side; a replica that does not read its messages is given up."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.abort(Unavailable("the replica does not read its messages"))

    def end(self, last: Out) -> None:
        """Queue the last message; after it our side of the stream is closed."""
        self.send(last)
        self.send(None)

    def abort(self, error: OutriderError) -> None:
        """Cancel the call; `run` raises `error`."""
        if self._aborted is None:
            self._aborted = error
        if self._call is not None:
            self._call.cancel()

    async def run(
        self, call: grpc.aio.StreamStreamCall[Any, Any], receive: Callable[[In], Awaitable[None]]
    ) -> None:
        """Carry messages both ways until the replica ends the stream; however it ends, the call is over.

        Raises:
            OutriderError: the stream failed, or was aborted.
        """
        self._call = call
        if self._aborted is not None:
            call.cancel()
            raise self._aborted
        ending = Ending(call)
        reader = asyncio.create_task(self._read(call, receive))
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reader})
        finally:
            call.cancel()
            await self._end(reader, writer)
        if self._aborted is not None:
            raise self._aborted
        await _raise_error_of(reader, ending)

    async def _read(
        self, call: grpc.aio.StreamStreamCall[Any, Any], receive: Callable[[In], Awaitable[None]]
    ) -> None:
        while (message := await call.read()) is not grpc.aio.EOF and not self._ended:
            self._receiving = True
            try:
                await receive(parsed(cast(In | None, message)))
            except InvalidRequest as error:  # the replica's mistake, not the caller's
                raise InternalError(f"the replica sent a malformed message: {error}") from None
            self._receiving = False

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        try:
            await call.wait_for_connection()
            while not self._ended and (message := await self._outbox.get()) is not None:
                self._sending = True
                await call.write(message)
                self._sending = False
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over; the reader says why

    async def _end(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        """Wait for both tasks after the call has been cancelled: its reads and writes end by themselves."""
        self._ended = True
        if self._receiving:
            reader.cancel()
        if not self._sending:
            writer.cancel()
        ended, late = await asyncio.wait({reader, writer}, timeout=END_SECONDS)
        for task in late:
            task.cancel()
        for task in ended:
            task.cancelled() or task.exception()  # looked at, so that asyncio does not report it


async def _raise_error_of(reader: asyncio.Task[None], ending: Ending) -> None:
    if reader.cancelled():
        raise Unavailable("the channel to the replica was closed")
    error = reader.exception()
    if isinstance(error, grpc.aio.AioRpcError):
        error = await ending.error_of(error)
    if error is not None:
        raise error from None
