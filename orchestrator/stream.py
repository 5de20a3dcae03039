"""One bidirectional stream to a replica: a bounded outbox, a reader, and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, cast

import grpc

from outrider.channels import error_of
from outrider.errors import OutriderError, Unavailable

MAX_UNSENT = 256
"""Messages that may wait for a replica to read them; one that lets more pile up is given up."""

Out = TypeVar("Out")
In = TypeVar("In")


class ReplicaStream(Generic[Out, In]):
    """Messages of type Out go to a replica in order, messages of type In come back.

    `send` never waits; the call itself may not be open yet. `run` opens it and returns when the replica has
    ended the stream.
    """

    def __init__(self, first: Out) -> None:
        self._outbox: asyncio.Queue[Out | None] = asyncio.Queue(MAX_UNSENT)
        self._outbox.put_nowait(first)
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._aborted: OutriderError | None = None

    def send(self, message: Out) -> None:
        """Queue a message; a replica that does not read its messages is given up."""
        self._put(message)

    def end(self, last: Out) -> None:
        """Queue the last message; after it our side of the stream is closed."""
        self._put(last)
        self._put(None)

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
        writer = asyncio.create_task(self._write(call))
        try:
            if self._aborted is None:
                await self._read(call, receive)
        except grpc.aio.AioRpcError as error:
            raise self._aborted or error_of(error) from None
        except asyncio.CancelledError:  # our own abort looks like this too
            if self._aborted is None:
                raise
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.wait({writer})
        if self._aborted is not None:
            raise self._aborted

    def _put(self, message: Out | None) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.abort(Unavailable("the replica does not read its messages"))

    async def _read(
        self, call: grpc.aio.StreamStreamCall[Any, Any], receive: Callable[[In], Awaitable[None]]
    ) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            await receive(cast(In, message))

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over; the reader says why
