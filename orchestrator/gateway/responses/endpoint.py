"""`/v1/responses`: a conversation's next message, generated as a chat completion."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.incoming.requests import HttpRequest
from orchestrator.gateway.outgoing.completion_answer import read_output
from orchestrator.gateway.responses.answer import ResponseAnswer
from orchestrator.gateway.responses.output import Output, StreamEvent
from orchestrator.gateway.responses.request import ResponseRequest, responses_from
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

PATH = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Responding:
    """The endpoint. `format` is that of the model's output."""

    resources: Resources
    format: OutputFormat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request = await self.resources.bodies.read(dict(scope["headers"]), receive, responses_from)
        request = replace(request, http=await self._in_format(request, scope))
        answer = self._answer(request, scope)
        events = self.resources.events(request.http, scope)
        if request.http.stream:
            work = send_stream(
                send, _parts(answer, events), end=b"", failed=lambda problem: _sent(answer.failed(problem))
            )
        else:
            work = _whole(answer, events, send)
        await self.resources.work(receive, work)

    async def _in_format(self, request: ResponseRequest, scope: Scope) -> HttpRequest:
        try:
            return await self.resources.in_format(request.http, self.format, scope)
        except Exception as error:
            raise request.named(problem_from(error)) from None

    def _answer(self, request: ResponseRequest, scope: Scope) -> ResponseAnswer:
        state = scope["state"]
        output = Output(state["request_id"], read_output(request.http, self.format))
        return ResponseAnswer(state["request_id"], int(time.time()), request, output, state["figures"])


async def _whole(answer: ResponseAnswer, events: AsyncGenerator[Event, None], send: Send) -> None:
    last: list[StreamEvent] = []
    async with aclosing(_stream_events(answer, events)) as found:
        async for new in found:
            last = new or last
    await send_json(send, 200, last[-1]["response"])


async def _parts(answer: ResponseAnswer, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(_stream_events(answer, events)) as found:
        async for new in found:
            yield _sent(new)


async def _stream_events(
    answer: ResponseAnswer, events: AsyncGenerator[Event, None]
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
        raise answer.request.named(problem_from(error)) from None


def _sent(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(server_sent(one, event=one["type"]) for one in events)
