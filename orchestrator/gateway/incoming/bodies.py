"""Reads the bodies of requests: bounded in size and time, and large ones in another process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NoReturn, TypeVar

from orchestrator.gateway.errors import KINDS, Kind, Problem
from orchestrator.gateway.sending import Receive
from outrider.process import end_with_parent
from outrider.protocol.errors import Flood, InvalidRequest, Unavailable, no_json
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
INLINE_BYTES = 64 << 10
"""Bodies up to here are read on the event loop: a millisecond or two."""
BODY_SECONDS = 30.0
"""Longest wait for a body."""
MAX_PARSING = 16
"""Large bodies that are read or wait for it; each is held in memory."""
SLOW = Kind(408, "invalid_request_error", "request_timeout")
MEDIA = Kind(415, "invalid_request_error", "unsupported_media_type")
GONE = Kind(499, "invalid_request_error", "client_closed_request")

_T = TypeVar("_T")
Parse = Callable[[Any], _T]
"""Makes a request of a body's JSON: a function of a module, so that another process finds it."""


class Bodies:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._pool: ProcessPoolExecutor | None = None
        self._parsing = 0

    async def read(self, headers: dict[bytes, bytes], receive: Receive, parse: Parse[_T]) -> _T:
        """The request in a body.

        Raises:
            Problem: the body is too large, comes too slowly, is no JSON, or a field is wrong.
            Unavailable: too many large ones are being parsed.
        """
        if not _is_json(headers.get(b"content-type", b"")):
            raise Problem(MEDIA, "content-type: must be application/json")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Problem(MEDIA, "content-encoding: is not supported; send the JSON as it is")
        try:
            async with asyncio.timeout(self._seconds):
                data = await self._bytes(headers, receive)
        except TimeoutError:
            raise Problem(SLOW, f"the body did not come within {self._seconds:g} s") from None
        if len(data) <= INLINE_BYTES:
            return _parsed(data, parse)
        return await self._parsed_elsewhere(data, parse)

    def close(self) -> None:
        """End the process that parses."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _bytes(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > self._max_bytes:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Problem(GONE, "the connection was closed before the body had come")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _parsed_elsewhere(self, data: bytes, parse: Parse[_T]) -> _T:
        """In another process: the parser holds the interpreter's lock, so a thread would stop the loop."""
        if self._parsing >= MAX_PARSING:
            raise Unavailable(f"{self._parsing} large requests are being read; try again")
        self._parsing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._started(), _parsed, data, parse)
        except BrokenProcessPool:
            logger.warning("the process that parses large requests has ended")
            self._pool = None
            raise Unavailable("the request could not be read; try again") from None
        finally:
            self._parsing -= 1

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, end_with_parent, (os.getpid(),))
        return self._pool

    def _too_large(self) -> Problem:
        return Problem(KINDS[Flood], f"the body is larger than {self._max_bytes} bytes; shorten it")


def _parsed(data: bytes, parse: Parse[_T]) -> _T:
    try:
        value = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _no_json(no_json(error)) from None
    return parse(value)


def _refuse(constant: str) -> NoReturn:
    raise _no_json(f"{constant} is no number of JSON")


def _no_json(reason: str) -> Problem:
    return Problem(KINDS[InvalidRequest], f"the body is no JSON: {reason[:200]}")


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
