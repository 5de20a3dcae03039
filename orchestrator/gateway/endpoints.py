"""What is answered at each path."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

from orchestrator.gateway.bodies import Bodies
from orchestrator.gateway.continuing import HEADER, Progress, continued, told_ids
from orchestrator.gateway.errors import UNEXPECTED, Problem, problem_of, wrong
from orchestrator.gateway.figures import metrics_of
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.gateway.requests import Asked, chat_from, completions_from
from orchestrator.gateway.responses import Answer, MakeParser
from orchestrator.gateway.streams import merged, while_connected
from outrider.client import AsyncClient, Chunk, Complete, Event, Model
from outrider.client.results import Collected
from outrider.protocol.errors import InternalError, InvalidRequest, OutriderError, UnknownModel
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

Scope = dict[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Any]]
Send = Callable[[Any], Coroutine[Any, Any, None]]


class Generating:
    """`/v1/completions` or `/v1/chat/completions`: one request to its end, or until its caller goes."""

    def __init__(
        self,
        client: AsyncClient,
        bodies: Bodies,
        instruments: GatewayInstruments,
        seconds: float,
        chat: bool,
        make_parser: MakeParser | None = None,
    ) -> None:
        self._client = client
        self._bodies = bodies
        self._instruments = instruments
        self._seconds = seconds
        self._asked_from = chat_from if chat else completions_from
        self._make_parser = make_parser

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        headers = dict(scope["headers"])
        asked = await self._bodies.read(headers, receive, self._asked_from)
        asked, progress = continued(asked, headers.get(HEADER.encode(), b"").decode("latin-1"))
        if asked.tools is not None and self._make_parser is None:
            raise wrong("tools", "needs the gateway's setting tool_call_parser; or send tool_choice 'none'")
        progress = progress if told_ids(headers) else None
        answer = Answer.to(asked, scope["state"]["request_id"], int(time.time()), self._make_parser)
        events = self._events(asked, scope["state"])
        if asked.stream:
            work = self._stream(answer, events, send, progress, scope["state"]["figures"])
        else:
            work = self._whole(answer, events, send, scope["state"])
        if not await while_connected(receive, work):
            self._instruments.aborted()

    async def _whole(
        self, answer: Answer, events: AsyncGenerator[Event, None], send: Send, state: dict[str, Any]
    ) -> None:
        collected = Collected()
        async with aclosing(events):
            async for event in events:
                collected.add(event)
        echoed = await self._prompts(answer.asked, state) if answer.asked.echo else ()
        found = collected.result().generations
        figures = _metrics(state["figures"], [one.end for one in found])
        await send_json(send, 200, answer.finished(found, echoed) | figures)

    async def _prompts(self, asked: Asked, state: dict[str, Any]) -> list[str]:
        """The prompts' texts; those of token ids have all tokens spelled out."""
        call: dict[str, Any] = {"timeout": self._seconds, "token": state["token"]}
        texts = []
        for one in asked.requests:
            ids: Any = one.prompt
            is_text = isinstance(one.prompt, str)
            told = (
                one.prompt
                if is_text
                else await self._client.detokenize(ids, keep_special_tokens=True, **call)
            )
            texts.append(str(told))
        return texts

    async def _stream(
        self,
        answer: Answer,
        events: AsyncGenerator[Event, None],
        send: Send,
        progress: Progress | None,
        figures: bool,
    ) -> None:
        """The status is sent with the first event: what is refused before it has a status of its own."""
        begun, ends = False, list[Complete]()
        async with aclosing(events):
            try:
                async for event in events:
                    ends += [event] if isinstance(event, Complete) else []
                    left = event if progress is None else progress.left(event)
                    part = answer.part(event, left)
                    if not begun:
                        await begin_stream(send)
                        begun = True
                    if part is not None:
                        await send_part(send, part, progress)
            except Exception as error:
                if not begun:
                    raise
                await send(body_part(server_sent(problem_from(error).body()), last=True))
                return
        if answer.asked.include_usage:
            await send_part(send, answer.usage_part() | _metrics(figures, ends))
        await send(body_part(DONE, last=True))

    async def _events(self, asked: Asked, state: dict[str, Any]) -> AsyncGenerator[Event, None]:
        """All events of a request, counted."""
        opened, first = time.monotonic(), True
        streams = [partial(self._client.stream, one, **self._call(state)) for one in asked.requests]
        try:
            async with aclosing(merged(streams, asked.per_prompt)) as events:
                async for event in events:
                    if first and isinstance(event, Chunk) and event.token_ids:
                        self._instruments.first_text(time.monotonic() - opened)
                        first = False
                    if isinstance(event, Complete):
                        tokens = event.usage.completion_tokens
                        self._instruments.completed(event.model, tokens, event.speculation)
                    yield event
        except InvalidRequest as error:
            raise asked.named(error) from None

    def _call(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"timeout": self._seconds, **_credentials(state)}


class Models:
    """`/v1/models` and `/v1/models/{model}`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        models = await self._client.models(token=scope["state"]["token"])
        asked = scope.get("path_params", {}).get("model")
        if asked is None:
            await send_json(send, 200, {"object": "list", "data": [self._shown(one) for one in models]})
            return
        found = next((one for one in models if one.name == asked), None)
        if found is None:
            raise UnknownModel(asked[:200], models[0].name if models else "")
        await send_json(send, 200, self._shown(found))

    def _shown(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "max_model_len": model.context_length,
        }


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


async def send_problem(send: Send, error: Exception) -> None:
    """The answer that stands for an error."""
    problem = problem_from(error)
    await send_json(send, problem.kind.status, problem.body(), dict(problem.headers))


def dumped(value: Any) -> bytes:
    """JSON, as short as it can be."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def problem_from(error: Exception) -> Problem:
    """What the caller hears of an error; what it must not hear is logged."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, OutriderError):
        return problem_of(error)
    logger.error("unexpected error", exc_info=error)
    return problem_of(InternalError(UNEXPECTED))


def _metrics(wanted: bool, ends: list[Complete]) -> dict[str, Any]:
    return {"metrics": metrics_of(ends)} if wanted else {}


def _credentials(state: dict[str, Any]) -> dict[str, str]:
    return {name: state[name] for name in ("token", "request_id", "traceparent")}


async def begin_stream(send: Send) -> None:
    """The head of an answer of server-sent events."""
    headers = [
        (b"content-type", EVENTS),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(send: Send, part: dict[str, Any], progress: Progress | None = None) -> None:
    """One event of a stream, with its id where it has one."""
    id_line = b"" if progress is None else f"id: {progress.id}\n".encode()
    await send(body_part(id_line + server_sent(part)))


def server_sent(value: Any) -> bytes:
    """An event with a value as JSON."""
    return b"data: " + dumped(value) + b"\n\n"


def body_part(data: bytes, last: bool = False) -> dict[str, Any]:
    """Part of an answer's body."""
    return {"type": "http.response.body", "body": data, "more_body": not last}
