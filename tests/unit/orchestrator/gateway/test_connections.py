"""Connections of the gateway to callers of many kinds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrator.gateway import connections
from orchestrator.gateway.server import Server, server_config
from outrider.sockets import bound

LIMIT = 16
"""Connections of the server before it answers that they are too many."""
BEGUN = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def answer(_scope: Any, _receive: Any, send: Any) -> None:
    """An application that says ok."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def parts(_scope: Any, _receive: Any, send: Any) -> None:
    """An application that says o and k."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"o", "more_body": True})
    await send({"type": "http.response.body", "body": b"k"})


async def echo(_scope: Any, receive: Any, send: Any) -> None:
    """An application that says what it hears."""
    data, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        data, more = data + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": data})


def after_the_end(application: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The application, which begins when the end of what the caller sends has been noticed."""
    noticed, received = asyncio.Event(), connections.Connection.eof_received

    def eof_received(self: connections.Connection) -> bool | None:
        noticed.set()
        return received(self)

    async def later(scope: Any, receive: Any, send: Any) -> None:
        await noticed.wait()
        await application(scope, receive, send)

    monkeypatch.setattr(connections.Connection, "eof_received", eof_received)
    return later


@contextlib.asynccontextmanager
async def connected(
    application: Any = answer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of an application."""
    server, listener = Server(server_config(application, LIMIT, 1.0)), bound("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.up.wait()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


@pytest.mark.parametrize("line", [b"X: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
async def test_headers_have_a_bound(line: bytes) -> None:
    """Many headers, or one without end: the connection ends with a sentence, and not with the memory."""
    async with connected() as (reader, writer):
        writer.write(BEGUN + line * (2 * connections.HEAD_BYTES // len(line)))
        found = await reader.readuntil(b"shorten them.")
    assert b"headers are larger than 65536 bytes" in found


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "line"),
    [
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * 1000),
        (CHUNKED + b"1;x=", b"a" * 1000),
    ],
)
async def test_what_surrounds_a_body_has_a_bound(begun: bytes, line: bytes) -> None:
    """So do trailers behind a body in chunks, and notes on a chunk."""
    async with connected(echo) as (reader, writer), asyncio.timeout(10):
        writer.write(begun)
        await writer.drain()
        writer.write(line * (8 * connections.HEAD_BYTES // len(line)))
        found = await reader.readuntil(b"shorten them.")
    assert b"headers are larger than 65536 bytes" in found


def test_trailers_are_no_headers() -> None:
    """What comes behind the body cannot change how the request is taken; a large body in small chunks has
    no bound here."""
    scopes: list[Any] = []

    async def kept(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await echo(scope, receive, send)

    async def run() -> bytes:
        async with connected(kept) as (reader, writer), asyncio.timeout(10):
            parts = b"1\r\na\r\n" * (connections.HEAD_BYTES // 2)
            writer.write(CHUNKED + parts + b"0\r\nAuthorization: Bearer x\r\n\r\n")
            return await reader.readuntil(b"\r\n0\r\n\r\n")

    assert b"a" * (connections.HEAD_BYTES // 2) in asyncio.run(run())
    assert [name for name, _ in scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


def test_an_answer_that_is_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its application is told that the caller has gone, and nothing of the connection is left."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.05)
    over = asyncio.Event()

    async def endless(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        assert gone.result()["type"] == "http.disconnect"
        over.set()

    async def run() -> None:
        async with connected(endless) as (reader, writer), asyncio.timeout(10):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(BEGUN + b"\r\n")
            await over.wait()

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", BEGUN, BEGUN + b"\r\n" + BEGUN])
async def test_headers_have_a_time(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing, or not all, is closed; so is one that had an answer before."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with connected() as (reader, writer):
        writer.write(said)
        found = await reader.read()
    assert found.count(b"ok") == said.count(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "more"),
    [(BEGUN + b"\r\n", b"\r\n"), (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n", b"abc")],
)
async def test_a_connection_that_says_no_more_is_closed(
    request_: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what came after the answer was an empty line or the rest of a body, and no request."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with connected() as (reader, writer), asyncio.timeout(10):
        writer.write(request_)
        await reader.readuntil(b"\r\n\r\nok")
        writer.write(more)
        found = await reader.read()
    assert found == b""


def test_requests_that_wait_on_one_connection_have_a_bound() -> None:
    """A caller cannot fill the memory with requests that it sends before the first is answered."""
    begun = asyncio.Event()

    async def waits(_scope: Any, receive: Any, _send: Any) -> None:
        begun.set()
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> bytes:
        async with connected(waits) as (reader, writer), asyncio.timeout(10):
            writer.write((connections.MAX_WAITING + 2) * (BEGUN + b"\r\n"))
            await begun.wait()
            return await reader.read()

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400")


def test_bytes_that_wait_on_one_connection_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it nothing is read until an answer has ended, and no clock runs for what is not read."""
    monkeypatch.setattr(connections, "WAITING_BYTES", 1000)
    head = BEGUN + b"X: " + b"a" * 2000 + b"\r\n\r\n"
    go, paused, received = asyncio.Event(), asyncio.Event(), connections.Connection.data_received

    def data_received(self: connections.Connection, data: bytes) -> None:
        received(self, data)
        if self.flow.read_paused:
            assert self._deadline is None
            paused.set()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await answer(scope, receive, send)

    async def run() -> None:
        async with connected(waits) as (reader, writer), asyncio.timeout(20):
            writer.write(2 * head + head[:1000])
            await paused.wait()
            writer.write(head[1000:] + head)
            go.set()
            for _ in range(4):
                assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")

    monkeypatch.setattr(connections.Connection, "data_received", data_received)
    asyncio.run(run())


async def test_each_request_of_a_connection_has_bounds_of_its_own() -> None:
    """What came before does not count."""
    head = BEGUN + b"X: " + b"a" * (connections.HEAD_BYTES // 2) + b"\r\n\r\n"
    async with connected() as (reader, writer):
        answers = []
        for _ in range(4):
            writer.write(head)
            answers.append(await reader.readuntil(b"\r\n\r\nok"))
    assert all(one.startswith(b"HTTP/1.1 200") for one in answers)


@pytest.mark.parametrize("target", [b"/", b"x:80", b"http://x/"])
async def test_nobody_is_connected_elsewhere(target: bytes) -> None:
    """Who takes the gateway for a proxy is refused at once."""
    async with connected() as (reader, writer), asyncio.timeout(10):
        writer.write(b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        found = await reader.read()
    assert found.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("application", [answer, parts])
async def test_http_1_0_gets_no_chunks(application: Any) -> None:
    """It knows none: the end of the connection is that of the answer."""
    async with connected(application) as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        found = await reader.read()
    head, _, body = found.partition(b"\r\n\r\n")
    assert body == b"ok"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


async def test_http_1_1_gets_chunks() -> None:
    """Its connection stays for the next request."""
    async with connected(parts) as (reader, writer):
        writer.write(BEGUN + b"\r\n")
        found = await reader.readuntil(b"0\r\n\r\n")
    assert found.endswith(b"\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n")


@pytest.mark.parametrize("connection", [b"", b", close"])
@pytest.mark.parametrize("cut", [0, 30, 95, 150])
@pytest.mark.parametrize(
    "body", [b"Content-Length: 4\r\n\r\nword", b"Transfer-Encoding: chunked\r\n\r\n4\r\nword\r\n0\r\n\r\n"]
)
async def test_a_wish_for_another_protocol_is_ignored(body: bytes, cut: int, connection: bytes) -> None:
    """Java's client and `curl --http2` send one with a body; the request is answered, and so is the next."""
    data = b"POST / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    data += b"Connection: Upgrade, HTTP2-Settings" + connection + b"\r\n" + body
    async with connected(echo) as (reader, writer):
        answers = []
        for _ in range(1 if connection else 2):
            writer.write(data[:cut])
            await asyncio.sleep(0)
            writer.write(data[cut:])
            answers.append(await reader.readuntil(b"word\r\n0\r\n\r\n"))
    assert all(one.startswith(b"HTTP/1.1 200") for one in answers)


@pytest.mark.parametrize("said", [BEGUN + b"\r\n", BEGUN + b"Content-Length: 4\r\n\r\nword"])
async def test_a_caller_that_has_closed_its_sending_side_is_answered(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says so before the answer is only what HTTP/1.1 allows; then the connection ends."""
    async with connected(after_the_end(echo, monkeypatch)) as (reader, writer):
        writer.write(said)
        writer.write_eof()
        found = await reader.read()
    assert found.startswith(connections.PROCESSING + b"HTTP/1.1 200")
    assert found.count(b"word") == said.count(b"word")


@pytest.mark.parametrize("requests", [1, 3])
async def test_all_requests_before_the_end_are_answered(requests: int) -> None:
    """One after the other, however early the end has come."""
    async with connected() as (reader, writer):
        writer.write(requests * (BEGUN + b"\r\n"))
        writer.write_eof()
        found = await reader.read()
    assert found.count(b"HTTP/1.1 200") == requests


@pytest.mark.parametrize("said", [b"", BEGUN, BEGUN + b"Content-Length: 4\r\n\r\nwor"])
async def test_who_closes_within_a_request_gets_no_answer(said: bytes) -> None:
    """The rest cannot come."""
    async with connected(echo) as (reader, writer):
        writer.write(said)
        writer.write_eof()
        found = await reader.read()
    assert found == b""


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_caller_that_has_gone_is_noticed(begun: bool, requests: int) -> None:
    """Whether the answer has begun or not, and whatever waits behind it, the application hears of it."""
    here, gone = asyncio.Event(), asyncio.Event()

    async def waits(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        here.set()
        hearing = asyncio.ensure_future(receive())
        while not (await asyncio.wait([hearing], timeout=0.01))[0]:
            if begun:
                await send({"type": "http.response.body", "body": b"o", "more_body": True})
        assert hearing.result()["type"] == "http.disconnect"
        gone.set()

    async with asyncio.timeout(20), connected(waits) as (_, writer):
        writer.write(requests * (BEGUN + b"\r\n"))
        await here.wait()
        writer.close()
        await gone.wait()


async def test_an_answer_before_the_end_of_a_body_arrives() -> None:
    """With `Connection: close` too, where a reset would take it away from a caller that still sends."""
    size = 16 << 20
    head = BEGUN.replace(b"GET", b"POST") + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size
    async with asyncio.timeout(20), connected() as (reader, writer):
        writer.write(head + b"x" * size)
        await writer.drain()
        found = await reader.read()
    assert found.endswith(b"\r\n\r\nok")


async def test_connections_are_bounded() -> None:
    """Some that are too many wait to hear so; those beyond are closed, and take no file."""
    async with asyncio.timeout(20), connected() as (reader, writer):
        address = writer.get_extra_info("peername")
        allowed = connections.CLOSED_FROM * LIMIT
        others = [await asyncio.open_connection(*address) for _ in range(allowed)]
        with contextlib.suppress(ConnectionError):
            assert await others[-1][0].read() == b""
        writer.write(BEGUN + b"Connection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        for _, other in others:
            other.close()
