"""`/outrider/stream`: one prompt's text with the details of its steps, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming.requests import HttpRequest, chat_from, completions_from
from orchestrator.gateway.sending import Receive, Scope, Send, send_stream, server_sent
from outrider.client import Chunk, Complete, Event, Started, Step

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
    if request.echo:
        raise wrong("echo", "is not supported here; leave it out")
    if request.top_logprobs is not None:
        raise wrong("logprobs", "are not sent here; leave it out")
    if request.prompt_logprobs:
        raise wrong("prompt_logprobs", "are not sent here; leave it out")
    return replace(request, requests=(replace(request.requests[0], record_steps=True),), stream=True)


@dataclass(frozen=True, slots=True)
class Steps:
    """Serves one request to its end, or until its caller goes."""

    resources: Resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request = await self.resources.bodies.read(dict(scope["headers"]), receive, steps_from)
        await self.resources.work(receive, send_stream(send, _parts(self.resources.events(request, scope))))


async def _parts(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield server_sent(event_json(event))


def event_json(event: Event) -> dict[str, Any]:
    """One event of a stream whose request asked for its steps, with no number that a browser would round."""
    match event:
        case Started():
            return {
                "type": "started",
                "seed": str(event.seed),
                **_some(event, "request_id", "model", "prompt_tokens", "cached_tokens"),
            }
        case Chunk():
            return {
                "type": "chunk",
                "text": event.text,
                "token_ids": event.token_ids,
                "origins": event.origins,
                "step": None if event.step is None else _step(event.step),
            }
        case Complete():
            return {
                "type": "complete",
                "finish_reason": event.finish_reason,
                "usage": asdict(event.usage),
                "speculation": event.speculation,
                "resumptions": event.resumptions,
            }


def _step(step: Step) -> dict[str, Any]:
    bonus = None if step.bonus is None else {"id": step.bonus, "text": _text(step.bonus_spelling)}
    return {
        "number": step.number,
        "nodes": [
            {"id": node.token, "text": _text(node.spelling)} | _some(node, "parent", "origin", "accepted")
            for node in step.nodes
        ],
        "bonus": bonus,
        "timeline": [
            {"start_us": bar.start_ns // 1000}
            | _some(bar, "lane", "name", "duration_us", "nodes", "accepted")
            for bar in step.timeline
        ],
    }


def _some(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _text(spelling: bytes | None) -> str | None:
    return None if spelling is None else spelling.decode("utf-8", errors="replace")
