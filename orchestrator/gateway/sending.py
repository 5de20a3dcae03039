"""Sends answers through ASGI: whole ones, streams of events, and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from orchestrator.gateway.errors import UNEXPECTED, Problem, problem_of
from outrider.protocol.errors import InternalError, OutriderError
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
LINE_ENDS = "\x85\u2028\u2029"
"""JSON may have them as they are, but some readers split text at them: they would cut an event."""

Scope = dict[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Any]]
Send = Callable[[Any], Coroutine[Any, Any, None]]


async def send_json(send: Send, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    """A whole answer."""
    await send_bytes(send, status, dumped(value), JSON, headers)


async def send_bytes(
    send: Send, status: int, data: bytes, kind: bytes, headers: dict[str, str] | None = None
) -> None:
    """A whole answer of a media type."""
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


async def send_problem(send: Send, error: Exception) -> Problem:
    """The answer that stands for an error; what it says."""
    problem = problem_from(error)
    await send_json(send, problem.kind.status, problem.body(), dict(problem.headers))
    return problem


def dumped(value: Any) -> bytes:
    """JSON, as short as it can be."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign in LINE_ENDS:
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "replace")


def problem_from(error: Exception) -> Problem:
    """What the caller hears of an error; what it must not hear is logged."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, OutriderError):
        return problem_of(error)
    logger.error("unexpected error", exc_info=error)
    return problem_of(InternalError(UNEXPECTED))


async def send_stream(send: Send, parts: AsyncGenerator[bytes, None], end: bytes = DONE) -> None:
    """An answer of server-sent events, as they come, and its end.

    The status is sent with the first one, even an empty one: what is refused before has a status of its own.
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
        except Exception as error:
            if not begun:
                raise
            await send(body_part(server_sent(problem_from(error).body()), last=True))
            return
    await send(body_part(end, last=True))


async def _begin_stream(send: Send) -> None:
    headers = [
        (b"content-type", EVENTS),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def server_sent(value: Any, id: str = "", event: str = "") -> bytes:
    """An event with a value as JSON, and its id and its name if it has them."""
    head = "".join(f"{name}: {text}\n" for name, text in (("id", id), ("event", event)) if text)
    return head.encode() + b"data: " + dumped(value) + b"\n\n"


def body_part(data: bytes, last: bool = False) -> dict[str, Any]:
    """Part of an answer's body."""
    return {"type": "http.response.body", "body": data, "more_body": not last}
