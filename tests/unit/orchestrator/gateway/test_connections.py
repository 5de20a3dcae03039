"""What comes before a request's body is bounded, in bytes and in seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrator.gateway import connections
from orchestrator.gateway.server import Server, server_config
from outrider.sockets import bound

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


@contextlib.asynccontextmanager
async def connected(
    application: Any = answer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of an application."""
    server, listener = Server(server_config(application, 16, 1.0)), bound("127.0.0.1", 0)
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
def test_headers_have_a_bound(line: bytes) -> None:
    """Many headers, or one without end: the connection ends with a sentence, and not with the memory."""

    async def run() -> bytes:
        async with connected() as (reader, writer):
            writer.write(BEGUN + line * (2 * connections.HEAD_BYTES // len(line)))
            return await reader.readuntil(b"shorten them.")

    assert b"headers are larger than 65536 bytes" in asyncio.run(run())


@pytest.mark.parametrize("said", [b"", BEGUN, BEGUN + b"\r\n" + BEGUN])
def test_headers_have_a_time(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing, or not all, is closed; so is one that had an answer before."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def run() -> bytes:
        async with connected() as (reader, writer):
            writer.write(said)
            return await reader.read()

    assert asyncio.run(run()).count(b"ok") == said.count(b"\r\n\r\n")


def test_each_request_of_a_connection_has_bounds_of_its_own() -> None:
    """What came before does not count."""
    head = BEGUN + b"X: " + b"a" * (connections.HEAD_BYTES // 2) + b"\r\n\r\n"

    async def run() -> list[bytes]:
        async with connected() as (reader, writer):
            answers = []
            for _ in range(4):
                writer.write(head)
                answers.append(await reader.readuntil(b"\r\n\r\nok"))
            return answers

    assert all(one.startswith(b"HTTP/1.1 200") for one in asyncio.run(run()))


@pytest.mark.parametrize("application", [answer, parts])
def test_http_1_0_gets_no_chunks(application: Any) -> None:
    """It knows none: the end of the connection is that of the answer."""

    async def run() -> bytes:
        async with connected(application) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            return await reader.read()

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert body == b"ok"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


def test_http_1_1_gets_chunks() -> None:
    """Its connection stays for the next request."""

    async def run() -> bytes:
        async with connected(parts) as (reader, writer):
            writer.write(BEGUN + b"\r\n")
            return await reader.readuntil(b"0\r\n\r\n")

    assert asyncio.run(run()).endswith(b"\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n")
