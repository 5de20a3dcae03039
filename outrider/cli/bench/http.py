"""As much of an HTTP/1.1 client as a benchmark needs: requests over connections that are kept, bodies as they
come. The standard library's own blocks, and a thread per request would cost the machine that is measured."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult

BROKEN = (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError)
"""What a connection that fails, or that speaks something else, raises."""


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kept: bool = False
    """True when it has carried a request before: its server may have closed it since."""

    @property
    def closed(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()


class Response:
    """An answer whose body has not been read."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self._headers = headers
        self._reader = reader
        self.whole = False
        """The body has been read to its end, and the connection can carry another request."""

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([piece async for piece in self.pieces()])

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Its lines as they come, without their ends."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its parts as they come.

        Raises:
            BROKEN: the connection failed before the end.
        """
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            while piece := await self._chunk():
                yield piece
        elif "content-length" in self._headers:
            yield await self._reader.readexactly(int(self._headers["content-length"]))
        else:
            while piece := await self._reader.read(65536):
                yield piece
            return
        self.whole = self._headers.get("connection", "").lower() != "close"

    async def _chunk(self) -> bytes:
        """The next chunk; empty at the end of the body."""
        size = int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        if size:
            return (await self._reader.readexactly(size + 2))[:size]
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return b""


class Http:
    """One server. Errors are those of `BROKEN`."""

    def __init__(self, base: SplitResult, tls: ssl.SSLContext | None, headers: Mapping[str, str]) -> None:
        self._base = base
        self._tls = tls
        self._headers = {"host": base.netloc, "accept": "*/*", **headers}
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """Close the connections that carry no request."""
        for connection in self._idle:
            connection.writer.close()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncGenerator[Response, None]:
        """Send a request below the server's address; leaving closes a connection whose body was not read."""
        connection, response = await self._sent(self._message(method, path, body))
        try:
            yield response
        finally:
            if response.whole:
                connection.kept = True
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _sent(self, message: bytes) -> tuple[_Connection, Response]:
        """The beginning of the answer; a kept connection that has gone is replaced by a new one."""
        while True:
            connection = await self._connection()
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                return connection, _response(await connection.reader.readuntil(b"\r\n\r\n"), connection)
            except BaseException as error:
                connection.writer.close()
                nothing = isinstance(error, ConnectionError) or _came(error) == b""
                if not (connection.kept and nothing):
                    raise

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
            connection.writer.close()
        port = self._base.port or (80 if self._tls is None else 443)
        return _Connection(*await asyncio.open_connection(self._base.hostname, port, ssl=self._tls))

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        headers = {**self._headers, "content-length": str(len(body))}
        head = [f"{method} {self._base.path.rstrip('/')}{path} HTTP/1.1", *map(": ".join, headers.items())]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def _response(head: bytes, connection: _Connection) -> Response:
    first, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    protocol, status = first.split(" ", 2)[:2]
    if not protocol.startswith("HTTP/1."):
        raise ValueError(f"answered {first[:40]!r}, which is not HTTP/1")
    pairs = (line.partition(":") for line in rest)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Response(int(status), headers, connection.reader)


def _came(error: BaseException) -> bytes | None:
    """What had come of an answer that a closed connection cut off; None: something else happened."""
    return error.partial if isinstance(error, asyncio.IncompleteReadError) else None
