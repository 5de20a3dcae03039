"""`/outrider/stream`: one prompt's text with the details of its steps, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from orchestrator.gateway.endpoints import Generating
from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming.requests import HttpRequest, chat_from, completions_from
from orchestrator.gateway.page.events import event_json
from orchestrator.gateway.sending import Receive, Scope, Send, send_stream, server_sent
from outrider.client import Event

PATH = "/outrider/stream"


def steps_from(body: Any) -> HttpRequest:
    """What the body of `/outrider/stream` asks for. With messages it is the body of a chat, otherwise
    that of a completion.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    chat = isinstance(body, dict) and body.get("messages") is not None
    request = chat_from(body) if chat else completions_from(body)
    if len(request.requests) > 1:
        raise wrong("prompt", "must be one prompt here")
    if request.per_prompt > 1:
        raise wrong("n", "must be 1 here")
    if request.top_logprobs is not None:
        raise wrong("logprobs", "are not sent here; leave it out")
    return replace(request, requests=(replace(request.requests[0], record_steps=True),), stream=True)


class Steps(Generating):
    """Serves one request to its end, or until its caller goes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request = await self.resources.bodies.read(dict(scope["headers"]), receive, self.parse)
        await self.resources.work(receive, send_stream(send, _parts(self.resources.events(request, scope))))


async def _parts(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield server_sent(event_json(event))
