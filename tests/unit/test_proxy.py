"""The TCP proxy that stands for a network, before an echo server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from scripts.proxy import Proxy, precise_loop

WAIT = 10.0


@asynccontextmanager
async def echo_behind_proxy(round_trip: float = 0.0) -> AsyncIterator[Proxy]:
    """A proxy to a server that answers with what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", round_trip)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run to the end on the proxy's own kind of event loop."""
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), WAIT))


async def connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection through the proxy."""
    host, _, port = proxy.endpoint.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_bytes_come_back_in_order_and_the_end_is_passed_on() -> None:
    """A large message survives the way there and back, and half-closing one side ends the other."""
    async with echo_behind_proxy(0.002) as proxy:
        reader, writer = await connect(proxy)
        message = bytes(range(256)) * 4096
        writer.write(message)
        writer.write_eof()
        assert await reader.read() == message


async def test_a_round_trip_takes_at_least_its_time() -> None:
    """Half of the delay is spent in each direction, so an answer takes all of it."""
    async with echo_behind_proxy(0.05) as proxy:
        reader, writer = await connect(proxy)
        loop = asyncio.get_running_loop()
        started = loop.time()
        writer.write(b"ping")
        await reader.readexactly(4)
        assert loop.time() - started >= 0.05


async def test_messages_on_the_way_do_not_wait_for_each_other() -> None:
    """Delay is no limit of throughput: ten messages sent within one delay arrive about one delay later."""
    async with echo_behind_proxy(0.5) as proxy:
        reader, writer = await connect(proxy)
        started = asyncio.get_running_loop().time()
        for _ in range(10):
            writer.write(b"x" * 100)
            await asyncio.sleep(0.001)
        await reader.readexactly(1000)
        assert asyncio.get_running_loop().time() - started < 4.0  # one after the other: 5 or more


async def test_a_frozen_connection_says_nothing_until_it_thaws() -> None:
    """Held-back bytes arrive after the thaw, complete and in order."""
    async with echo_behind_proxy() as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.freeze()
        writer.write(b"bc")
        answer = asyncio.ensure_future(reader.readexactly(2))
        done, _ = await asyncio.wait([answer], timeout=0.05)
        assert not done
        proxy.thaw()
        assert await answer == b"bc"


async def test_a_cut_ends_connections_and_new_ones_work() -> None:
    """After a cut the client sees a reset or the end; the next connection is served."""
    async with echo_behind_proxy() as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.cut()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        reader, writer = await connect(proxy)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"


async def test_new_connections_go_where_the_proxy_was_redirected() -> None:
    """A connection stays with the server that it was made to; the next one reaches the other."""
    async with echo_behind_proxy() as proxy, echo_behind_proxy() as other:
        reader, writer = await connect(proxy)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        proxy.redirect(other.endpoint)
        fresh_reader, fresh_writer = await connect(proxy)
        fresh_writer.write(b"after")
        assert await fresh_reader.readexactly(5) == b"after"
        other.cut()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await fresh_reader.readexactly(1)
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"still here"
