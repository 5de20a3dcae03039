"""Reads the bodies of requests: bounded in size and time. Large ones are parsed in another process."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from orchestrator.gateway.errors import KINDS, WRONG, Kind, Problem
from orchestrator.gateway.sending import Receive
from orchestrator.gateway.strict_json import NoNumber, parsed
from outrider.process import helpers_keep_running
from outrider.protocol.errors import Flood, InvalidRequest, Unavailable, no_json
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
INLINE_BYTES = 64 << 10
"""Size in bytes up to which a body is parsed on the event loop. It takes a millisecond or two."""
BODY_SECONDS = 30.0
"""Longest wait for a body, in seconds."""
ANSWER_SECONDS = 120.0
"""Seconds after which the process that parses large bodies counts as hung: all that may wait take fewer."""
NO_SHARED_MEMORY = (errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS)
"""Errors of locks between processes, which are files in /dev/shm: it is full, missing or not writable."""
MAX_HELD = 16
"""Most bodies of the largest size in memory at once. Smaller ones may take as many bytes together."""
SLOW = Kind(408, WRONG, "request_timeout")
MEDIA = Kind(415, WRONG, "unsupported_media_type")
GONE = Kind(499, WRONG, "client_closed_request")

_T = TypeVar("_T")
Parse = Callable[[Any], _T]
"""Makes a request from a body's JSON. It is a function of a module, so that another process can import it."""


class Bodies:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._pool: ProcessPoolExecutor | None = None
        self._children: set[BaseProcess] = set()
        """The process of the pool, and one that it has replaced and that has not ended yet."""
        self._held = 0
        """Bytes of the bodies that are being received or parsed."""

    async def read(self, headers: dict[bytes, bytes], receive: Receive, parse: Parse[_T]) -> _T:
        """Receive a body and return the request in it.

        Raises:
            Problem: the body is too large, comes too slowly, is not JSON, or a field is wrong.
            Unavailable: it is large, and other bodies have taken the memory.
        """
        if not _is_json(headers.get(b"content-type", b"")):
            raise Problem(MEDIA, "content-type: must be application/json")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Problem(MEDIA, "content-encoding: is not supported; send the JSON as it is")
        held: list[bytes] = []
        try:
            async with asyncio.timeout(self._seconds):
                await self._receive(headers, receive, held)
            held[:] = [b"".join(held)]
            inline = len(held[0]) <= INLINE_BYTES
            return _parsed(held[0], parse) if inline else await self._parsed_elsewhere(held[0], parse)
        except TimeoutError:
            raise Problem(SLOW, f"the body did not come within {self._seconds:g} s") from None
        finally:
            self._held -= sum(map(len, held))

    def close(self) -> None:
        """End the process that parses, even one that is stopped.

        Its thread ends with it. Otherwise Python, which wakes that thread at exit, may find it half closed.
        """
        if self._pool is not None:
            self._kill()
            self._pool.shutdown(cancel_futures=True)

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    async def _receive(self, headers: dict[bytes, bytes], receive: Receive, held: list[bytes]) -> None:
        """Put the parts of a body into `held`, and count them."""
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > self._max_bytes:
            raise self._too_large()
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Problem(GONE, "the connection was closed before the body had come")
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > self._max_bytes:
                raise self._too_large()
            if size > INLINE_BYTES and self._held + len(part) > MAX_HELD * self._max_bytes:
                raise Unavailable("large requests of others are being read; try again")
            held.append(part)
            self._held += len(part)

    async def _parsed_elsewhere(self, data: bytes, parse: Parse[_T]) -> _T:
        """Parse in another process: in a thread, the parser would lock the interpreter and stop the loop.

        A process that has ended or hangs, perhaps because of another body, is replaced once.
        """
        for _ in range(2):
            pool = self._started()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._submit(pool, data, parse)
            except (BrokenProcessPool, TimeoutError):
                self._give_up(pool)
        raise Unavailable("the request could not be read; try again")

    def _give_up(self, pool: ProcessPoolExecutor) -> None:
        """Its process has ended or hangs. Another request may have noticed it before."""
        if self._pool is pool:
            logger.warning("the process that parses large requests has ended or hangs")
            self._pool = None
            self._kill()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            with _room():
                self._pool = ProcessPoolExecutor(1, context, _begin)
        return self._pool

    def _submit(self, pool: ProcessPoolExecutor, data: bytes, parse: Parse[_T]) -> asyncio.Future[_T]:
        """Hand over a body; the process starts with the first."""
        before = set(multiprocessing.active_children())
        try:
            with _room(), helpers_keep_running():
                return asyncio.get_running_loop().run_in_executor(pool, _parsed, data, parse)
        except Unavailable:
            self._pool = None  # it would keep the body
            raise
        finally:
            alive = set(multiprocessing.active_children())
            self._children = (self._children & alive) | (alive - before)

    def _too_large(self) -> Problem:
        return Problem(KINDS[Flood], f"the body is larger than {self._max_bytes} bytes; shorten it")


@contextmanager
def _room() -> Iterator[None]:
    """Raise Unavailable if this machine has no room for another process."""
    try:
        yield
    except BrokenProcessPool:
        raise
    except (OSError, RuntimeError) as error:  # the latter for a thread
        lacks_memory = isinstance(error, OSError) and error.errno in NO_SHARED_MEMORY
        hint = "; the gateway needs room in /dev/shm, and must be able to write there" if lacks_memory else ""
        problem = f"no process to read large requests can be started: {error}{hint}"
        logger.warning(problem)
        raise Unavailable(problem) from error


def _begin() -> None:
    """The other process begins."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _parsed(data: bytes, parse: Parse[_T]) -> _T:
    try:
        return parse(_value(data))
    except RecursionError as error:  # `parse` may need more levels than the JSON itself
        raise _no_json(no_json(error)) from None


def _value(data: bytes) -> Any:
    try:
        return parsed(data)
    except NoNumber as error:
        raise _no_json(str(error)) from None
    except ValueError as error:
        raise _no_json(no_json(error)) from None


def _no_json(reason: str) -> Problem:
    return Problem(KINDS[InvalidRequest], f"the body is not JSON: {reason[:200]}")


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
