"""Endpoints that generate a conversation's next message as a chat completion, and answer in another form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.incoming.bodies import Parse
from orchestrator.gateway.incoming.turns import ConversationRequest
from orchestrator.gateway.outgoing.chat_shape import ReadOutput
from orchestrator.gateway.outgoing.completion_answer import read_output
from orchestrator.gateway.outgoing.typed_events import EventAnswer, StreamEvent
from orchestrator.gateway.sending import (
    Receive,
    Scope,
    Send,
    problem_from,
    send_json,
    send_stream,
    server_sent,
)
from outrider.client import Event

_Request = TypeVar("_Request", bound=ConversationRequest)
Begin = Callable[[_Request, ReadOutput, dict[str, Any]], EventAnswer]
"""Makes an answer from the request, from what reads its text, and from the scope's state."""


@dataclass(frozen=True, slots=True)
class Conversing(Generic[_Request]):
    """The endpoint. `parse` makes the request from a body's JSON; `format` is that of the model's output."""

    resources: Resources
    format: OutputFormat
    parse: Parse[_Request]
    begin: Begin[_Request]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request = await self.resources.bodies.read(dict(scope["headers"]), receive, self.parse)
        try:
            http = await self.resources.in_format(request.http, self.format, scope)
        except Exception as error:
            raise request.naming.named(problem_from(error)) from None
        answer = self.begin(replace(request, http=http), read_output(http, self.format), scope["state"])
        events = _stream_events(request, answer, self.resources.events(http, scope))
        if http.stream:
            work = send_stream(
                send, _parts(events), end=b"", failed=lambda problem: _sent(answer.failed(problem))
            )
        else:
            work = _whole(answer, events, send)
        await self.resources.work(receive, work)


@dataclass(frozen=True, slots=True)
class Counting:
    """Counts the tokens of a conversation's prompt. The answer has `more` beside the number."""

    resources: Resources
    parse: Parse[ConversationRequest]
    more: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request = await self.resources.bodies.read(dict(scope["headers"]), receive, self.parse)
        await self.resources.work(receive, self._count(request, scope, send))

    async def _count(self, request: ConversationRequest, scope: Scope, send: Send) -> None:
        try:
            found = await self.resources.tokenized(request.http.requests[0], scope)
        except Exception as error:
            raise request.naming.named(problem_from(error)) from None
        await send_json(send, 200, {**self.more, "input_tokens": found.count})


async def _whole(answer: EventAnswer, events: AsyncGenerator[list[StreamEvent], None], send: Send) -> None:
    async with aclosing(events):
        async for _ in events:
            pass
    await send_json(send, 200, answer.whole)


async def _parts(events: AsyncGenerator[list[StreamEvent], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for new in events:
            yield _sent(new)


async def _stream_events(
    request: ConversationRequest, answer: EventAnswer, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[list[StreamEvent], None]:
    """What a stream says of each event.

    Raises:
        Problem: a field is wrong, or nothing can serve the request.
    """
    try:
        async with aclosing(events):
            async for event in events:
                yield answer.events_of(event)
    except Exception as error:
        raise request.naming.named(problem_from(error)) from None


def _sent(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(server_sent(one, event=one["type"]) for one in events)
