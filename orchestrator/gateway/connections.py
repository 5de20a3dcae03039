"""Connections of the gateway.

What comes before a request's body is bounded in bytes and in seconds, and so is the number of requests that
wait for the answer to the one before. Callers that speak HTTP/1.0, ask for another protocol, or have closed
their sending side are answered too.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outrider.rpc.unread import UNREAD_SECONDS

HEAD_BYTES = 64 << 10
"""Most bytes of a request's first line and headers, and of what surrounds its body: trailers and chunk
extensions. What arrives with the last of the headers, or with a part of the body, is not counted."""
HEAD_SECONDS = 20.0
"""Longest wait for the headers, from a connection's beginning or a further request's first byte."""
MAX_WAITING = 64
"""Most requests of one connection that wait for the answer to the one before. Beyond that it is closed."""
WAITING_BYTES = 256 << 10
"""Bytes of waiting requests above which no more are read until an answer has ended."""
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""An interim answer that tells whether the caller is there: it changes nothing for one that listens, and the
operating system of one that has gone answers with a reset."""
LOOK_SECONDS = 0.1
"""Seconds between two looks at a connection that may be gone."""
CLOSED_FROM = 2
"""Connections beyond the limit are answered with 503. Beyond this multiple of it they are closed at once."""
LINGER_SECONDS = 5.0
"""Longest wait for the rest of a body whose answer has been sent."""
TOO_LARGE = f"The request's headers are larger than {HEAD_BYTES} bytes; shorten them."


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with the bounds on the size of headers and the wait for them that it lacks."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser = _Parser(self)
        self._head_bytes = 0
        self._head_ended = False
        """The last that came had the end of the headers, or a part of the body."""
        self._deadline: asyncio.TimerHandle | None = None
        """Set while the connection waits for the end of the headers."""
        self._running: RequestResponseCycle | None = None
        """The request that is answered; `cycle` is the last one that came."""
        self._waiting_bytes = 0
        """Bytes that came while requests waited."""
        self._unread: asyncio.TimerHandle | None = None
        """Set while the caller has to read before more can be written."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See uvicorn."""
        super().connection_made(transport)
        most = self.limit_concurrency
        if most is not None and len(self.connections) > CLOSED_FROM * most:
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn, which tells only the last request that came."""
        self._end_wait()
        self._end_unread()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def pause_writing(self) -> None:
        """See uvicorn, which would wait for ever for a caller who has stopped reading."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """See uvicorn."""
        super().resume_writing()
        self._end_unread()

    def data_received(self, data: bytes) -> None:
        """See uvicorn."""
        self._head_ended = False
        super().data_received(data)
        self._head_bytes = 0 if self._head_ended else self._head_bytes + len(data)
        self._waiting_bytes = self._waiting_bytes + len(data) if self.pipeline else 0
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._read_on()
        if self._head_bytes > HEAD_BYTES:
            self.send_400_response(TOO_LARGE)
        elif self._deadline is None and self.cycle.response_complete:
            self._await_head()  # uvicorn stops its own clock at any byte, even if no request begins with it

    def _read_on(self) -> None:
        """Read on although requests wait, unlike uvicorn: only so is the end of the connection seen."""
        if self._waiting_bytes <= WAITING_BYTES:
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()
            self._end_wait()  # we do not read the rest of these headers now

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The caller sends no more: it has gone, or has closed its sending side and waits for the answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._deadline is not None:
            return None
        begun = self._running is None or self._running.response_started
        if self.scheme == "https" or not (begun or self.scope["http_version"] == "1.1"):
            return None  # TLS closes both sides; HTTP/1.0 has no interim answer to probe with
        if not begun:
            self.transport.write(PROCESSING)
        cycle.keep_alive = False
        self._look()
        return True

    def _look(self) -> None:
        """End a connection that the other side has reset. Nothing else notices: it is not read any more."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(LOOK_SECONDS, self._look)

    def on_message_begin(self) -> None:
        """See uvicorn."""
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See uvicorn, which would take trailers for headers."""
        if self._deadline is not None:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """See uvicorn."""
        self._head_ended = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """See uvicorn."""
        if self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        if len(self.pipeline) >= MAX_WAITING:
            raise httptools.HttpParserError("too many requests wait")
        if self._comes_again():
            return
        self._end_wait()
        self._head_ended = True
        super().on_headers_complete()
        self._running = self._running if self.pipeline else self.cycle
        self.cycle.transport = cast(asyncio.Transport, _Lingering(self, self.cycle))
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        """See uvicorn."""
        if self._comes_again():
            return
        super().on_message_complete()
        if self.cycle.response_complete and not self.cycle.keep_alive:
            self.transport.close()  # the end that `_Lingering` waits for

    def on_response_complete(self) -> None:
        """See uvicorn, which now begins the next request that waits."""
        self._running = self.pipeline[-1][0] if self.pipeline else self._running
        super().on_response_complete()

    def plain_head(self) -> bytes:
        """The headers that have come, without the one that asks for another protocol."""
        lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        version = self.parser.get_http_version().encode()
        first = self.parser.get_method() + b" " + self.url + b" HTTP/" + version
        return b"\r\n".join([first, *lines, b"", b""])

    def _comes_again(self) -> bool:
        """Whether the parser ends the message here because of `upgrade`; it is then read again without it."""
        return bool(self.parser.should_upgrade())

    def _await_head(self) -> None:
        self._end_wait()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Lingering:
    """The transport of one answer, which reads and drops the rest of a request's body before it closes.

    If it closed while the body still comes, the connection would be reset, and the caller would not see the
    answer that says why.
    """

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """See asyncio."""
        transport = self._connection.transport
        if self._cycle.response_complete and self._cycle.more_body and transport.can_write_eof():
            transport.write_eof()
            self._connection.loop.call_later(LINGER_SECONDS, transport.close)
        else:
            transport.close()


class _Parser(httptools.HttpRequestParser):
    """The parser of httptools, which would end a request with `upgrade` at its headers.

    No other protocol is spoken here, so this is a request like any other, and its body follows.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """See httptools. After `upgrade` a new parser goes on: to the old one the connection may be over."""
        parser, connection = self, self._connection
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
                return
            except httptools.HttpParserUpgrade as end:
                data = connection.plain_head() + data[end.args[0] :]
                parser = connection.parser = _Parser(connection)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let an answer of unknown length end with its connection: HTTP/1.0 has no chunks."""
    send = cycle.send

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # the check then passes
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = sent  # type: ignore[method-assign]
