"""Connections of the gateway: what comes before a request's body has a bound in bytes and in seconds, and
callers that speak HTTP/1.0 get no chunks."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES = 64 << 10
"""Of a request's first line and headers. What has come at once with the last of them is not counted."""
HEAD_SECONDS = 20.0
"""Longest wait for them, from a connection's beginning or a further request's first byte."""
TOO_LARGE = f"The request's headers are larger than {HEAD_BYTES} bytes; shorten them."


class Connection(HttpToolsProtocol):
    """uvicorn's, which would keep headers without end in memory, and wait for ever for their end."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        """Set while the end of the headers is waited for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See uvicorn."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See uvicorn."""
        super().data_received(data)
        if self._deadline is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)

    def on_message_begin(self) -> None:
        """See uvicorn."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """See uvicorn."""
        self._end_wait()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def _await_head(self) -> None:
        self._end_wait()
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """An answer of unknown length ends with its connection: HTTP/1.0 knows no chunks."""
    send = cycle.send

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # each part is as long as it is
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = sent  # type: ignore[method-assign]
