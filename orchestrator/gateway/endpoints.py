"""The endpoints of the OpenAI API: completions, chat completions and models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from orchestrator.gateway.bodies import Bodies
from orchestrator.gateway.calls.formats import CallFormat
from orchestrator.gateway.continuing import HEADER, StreamProgress, continued, told_ids
from orchestrator.gateway.figures import metrics_of
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.gateway.requests import HttpRequest, in_call_format
from orchestrator.gateway.responses import Answer
from orchestrator.gateway.sending import Receive, Scope, Send, send_json, send_stream, server_sent
from orchestrator.gateway.streams import merged, while_connected
from outrider.client import AsyncClient, Chunk, Complete, Event, Model
from outrider.client.results import Collected
from outrider.protocol.errors import InvalidRequest, UnknownModel


class Generating:
    """`/v1/completions` or `/v1/chat/completions`: one request to its end, or until its caller goes.

    `asked_from` makes the request of a body.
    """

    def __init__(
        self,
        client: AsyncClient,
        bodies: Bodies,
        instruments: GatewayInstruments,
        seconds: float,
        asked_from: Callable[[Any], HttpRequest],
        calls: CallFormat | None = None,
    ) -> None:
        self._client = client
        self._bodies = bodies
        self._instruments = instruments
        self._seconds = seconds
        self._asked_from = asked_from
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        headers = dict(scope["headers"])
        asked = in_call_format(await self._bodies.read(headers, receive, self._asked_from), self._calls)
        asked, progress = continued(asked, headers.get(HEADER.encode(), b"").decode("latin-1"))
        progress = progress if told_ids(headers) else None
        answer = Answer.to(asked, scope["state"]["request_id"], int(time.time()), self._calls)
        events = self._events(asked, scope["state"])
        if asked.stream:
            work = send_stream(send, _parts(answer, events, progress, scope["state"]["figures"]))
        else:
            work = self._whole(answer, events, send, scope["state"])
        await while_connected(receive, work, self._instruments.aborted)

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

    async def _prompts(self, asked: HttpRequest, state: dict[str, Any]) -> list[str]:
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

    async def _events(self, asked: HttpRequest, state: dict[str, Any]) -> AsyncGenerator[Event, None]:
        """All events of a request, counted."""
        opened, first = time.monotonic(), True
        streams = [partial(self._client.stream, one, **self._call(state)) for one in asked.requests]
        try:
            async with aclosing(merged(streams, asked.per_prompt)) as events:
                async for event in events:
                    if first and isinstance(event, Chunk) and event.token_ids:
                        self._instruments.first_text.observe(time.monotonic() - opened)
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


async def _parts(
    answer: Answer, events: AsyncGenerator[Event, None], progress: StreamProgress | None, figures: bool
) -> AsyncGenerator[bytes, None]:
    """What a stream says of each event, which may be nothing, and at its end."""
    ends = list[Complete]()
    async with aclosing(events):
        async for event in events:
            ends += [event] if isinstance(event, Complete) else []
            part = answer.part(event, event if progress is None else progress.left(event))
            yield b"" if part is None else server_sent(part, "" if progress is None else progress.id)
    if answer.asked.include_usage:
        yield server_sent(answer.usage_part() | _metrics(figures, ends))


def _metrics(wanted: bool, ends: list[Complete]) -> dict[str, Any]:
    return {"metrics": metrics_of(ends)} if wanted else {}


def _credentials(state: dict[str, Any]) -> dict[str, str]:
    return {name: state[name] for name in ("token", "request_id", "traceparent")}
