"""The HTTP client against a scripted server."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from outrider.cli.bench.http import BROKEN, Http
from tests.unit.cli.bench.worlds import FakeOpenAi, chunked, in_a_loop, whole


async def lines(http: Http, body: bytes = b"1") -> list[bytes]:
    """Those of one answer."""
    async with http.request("POST", "/x", body) as response:
        return [line async for line in response.lines()]


def client(server: FakeOpenAi) -> Http:
    """Its client."""
    return Http(urlsplit(server.url), None, {"authorization": "Bearer t"})


@in_a_loop
async def test_a_request_has_what_http_asks_for() -> None:
    """Path below the address, host, headers, body."""
    async with FakeOpenAi(whole("ok")).serving() as server:
        assert await lines(client(server), b"[1]") == [b"ok"]
    ((first, headers, body),) = server.requests
    assert first == "POST /v1/x HTTP/1.1"
    assert headers["host"] == urlsplit(server.url).netloc
    assert (headers["authorization"], body) == ("Bearer t", [1])


@in_a_loop
async def test_lines_may_cross_chunks() -> None:
    """They come whole, without their ends, the last one too."""
    async with FakeOpenAi(chunked(b"one\ntw", b"o\r\n\nth", b"ree")).serving() as server:
        assert await lines(client(server)) == [b"one", b"two", b"", b"three"]


@in_a_loop
async def test_a_body_may_end_with_the_connection() -> None:
    """As of servers that know neither chunks nor lengths."""
    answer = b"HTTP/1.0 200 OK\r\nconnection: close\r\n\r\none\ntwo\n"
    async with FakeOpenAi(answer).serving() as server:
        assert await lines(client(server)) == [b"one", b"two"]


@in_a_loop
async def test_connections_are_kept() -> None:
    """One request after another needs one, those at once need more."""
    async with FakeOpenAi(chunked(b"one")).serving() as server:
        http = client(server)
        for _ in range(3):
            await lines(http)
        assert server.connections == 1
        await asyncio.gather(lines(http), lines(http))
        assert server.connections == 2
        http.close()


@in_a_loop
async def test_a_kept_connection_that_has_gone_is_replaced() -> None:
    """The server may close it at any time between two requests."""
    closing = whole("one").replace(b"\r\n\r\n", b"\r\nx-note: connection: close\r\n\r\n", 1)
    async with FakeOpenAi(closing, whole("two")).serving() as server:
        http = client(server)
        assert [await lines(http), await lines(http)] == [[b"one"], [b"two"]]
    assert server.connections == 2


@in_a_loop
async def test_an_unread_body_closes_its_connection() -> None:
    """Its rest must not be taken for the next answer."""
    async with FakeOpenAi(chunked(b"one\n", b"two\n")).serving() as server:
        http = client(server)
        async with http.request("POST", "/x", b"1"):
            pass
        assert await lines(http) == [b"one", b"two"]
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n",
        b"HTTP/2 200\r\nconnection: close\r\n\r\n",
        b"connection: close\r\n\r\n",
    ],
    ids=["short", "bad chunk", "another protocol", "no status"],
)
@in_a_loop
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    """Never a text cut off without a word."""
    async with FakeOpenAi(answer).serving() as server:
        with pytest.raises(BROKEN):
            await lines(client(server))
