"""Sends answers through ASGI: whole ones, streams of events, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from orchestrator.gateway.errors import UNEXPECTED, Problem, problem_of
from outrider.protocol.errors import InternalError, OutriderError, Unavailable
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
ENDING = "this gateway is shutting down; try another"
LINE_ENDS = "\x85\u2028\u2029"
"""Line ends that JSON allows in strings. Some readers split text at them, which would cut an event."""

Scope = dict[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Any]]
Send = Callable[[Any], Coroutine[Any, Any, None]]


async def send_json(send: Send, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    """Send a whole answer."""
    await send_bytes(send, status, dumped(value), JSON, headers)


async def send_bytes(
    send: Send, status: int, data: bytes, kind: bytes, headers: dict[str, str] | None = None
) -> None:
    """Send a whole answer; `kind` is its media type."""
    given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    length = (b"content-length", str(len(data)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind), length, *given],
        }
    )
    await send(body_part(data, last=True))


async def send_problem(send: Send, problem: Problem, body: Callable[[Problem], Any] = Problem.body) -> None:
    """Send the answer that stands for an error; `body` writes it."""
    await send_json(send, problem.kind.status, body(problem), dict(problem.headers))


def dumped(value: Any) -> bytes:
    """A value as JSON without spaces."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign in LINE_ENDS:
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "replace")


def problem_from(error: BaseException) -> Problem:
    """The problem that the caller is told. The details of an unexpected error are only logged.

    A request whose caller is still there is cancelled only when the gateway ends.
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, OutriderError):
        return problem_of(error)
    if isinstance(error, asyncio.CancelledError):
        return problem_of(Unavailable(ENDING))
    logger.error("unexpected error", exc_info=error)
    return problem_of(InternalError(UNEXPECTED))


def last_event(problem: Problem) -> bytes:
    """The event that ends a stream because of an error."""
    return server_sent(problem.body())


async def send_stream(
    send: Send,
    parts: AsyncGenerator[bytes, None],
    end: bytes = DONE,
    failed: Callable[[Problem], bytes] = last_event,
) -> None:
    """Send server-sent events as they come, then `end`.

    The status 200 is sent with the first part, even an empty one. An error before it has its own status.
    After it, `failed` makes the last events from the error.

    Raises:
        Problem: the error, whether the caller was told or not. A cancellation stays one.
    """
    begun = False
    async with aclosing(parts):
        try:
            async for part in parts:
                if not begun:
                    await _begin_stream(send)
                    begun = True
                if part:
                    await send(body_part(part))
        except (Exception, asyncio.CancelledError) as error:
            problem = problem_from(error)
            if begun:
                await send(body_part(failed(problem), last=True))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise problem from None
    await send(body_part(end, last=True))


async def _begin_stream(send: Send) -> None:
    headers = [
        (b"content-type", EVENTS),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def server_sent(value: Any, id: str = "", event: str = "") -> bytes:
    """A server-sent event with a value as JSON, and with its id and name unless they are empty."""
    head = "".join(f"{name}: {text}\n" for name, text in (("id", id), ("event", event)) if text)
    return head.encode() + b"data: " + dumped(value) + b"\n\n"


def body_part(data: bytes, last: bool = False) -> dict[str, Any]:
    """The ASGI message for a part of an answer's body."""
    return {"type": "http.response.body", "body": data, "more_body": not last}
