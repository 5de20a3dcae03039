"""Channels whose certificates are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from outrider.rpc.channels import RenewedChannel


class FakeCall:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called at the end."""
        self.callbacks.append(callback)

    def end(self) -> None:
        """Call all callbacks, which grpc.aio does again when a write fails at the end."""
        for callback in self.callbacks:
            callback(self)


class FakeChannel:
    """A connection."""

    def __init__(self) -> None:
        self.closed = False

    def stream_stream(self) -> Callable[[], FakeCall]:
        """A method."""
        return FakeCall

    async def close(self) -> None:
        """End all calls."""
        self.closed = True


class FakeCertificates:
    """They can be renewed."""

    def __init__(self) -> None:
        self.value = object()

    def current(self) -> object:
        """The newest ones."""
        return self.value


async def test_an_old_connection_is_closed_after_its_last_call() -> None:
    """Although grpc.aio says twice that an earlier one has ended."""
    connections: list[FakeChannel] = []

    def connect(_: Any) -> Any:
        connections.append(FakeChannel())
        return connections[-1]

    certificates = FakeCertificates()
    channel = RenewedChannel(certificates, connect)  # type: ignore[arg-type]
    first, last = channel.stream_stream()(), channel.stream_stream()()
    certificates.value = object()
    channel.stream_stream()()
    for call, closed in ((first, False), (first, False), (last, True)):
        call.end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert connections[0].closed is closed
