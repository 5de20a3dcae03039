"""The endpoints of the OpenAI API: completions, chat completions and models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.calls.reasoning_grammar import after_reasoning
from orchestrator.gateway.incoming.bodies import Bodies
from orchestrator.gateway.incoming.continuing import HEADER, StreamProgress, continued, wants_ids
from orchestrator.gateway.incoming.requests import HttpRequest, in_call_format
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.gateway.outgoing.completion_answer import Answer
from orchestrator.gateway.outgoing.figures import metrics_of
from orchestrator.gateway.sending import Receive, Scope, Send, send_json, send_stream, server_sent
from orchestrator.gateway.streams import merged, while_connected
from outrider.client import AsyncClient, Chunk, Complete, Event, Model, Request, Tokens
from outrider.client.results import Collected
from outrider.protocol.errors import InvalidRequest, UnknownModel

RENDERED = ("model", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Options of a conversation that decide how its prompt is written."""
END_TOKENS = 16
"""Tokens at the end of a prompt that are looked at for the beginning of reasoning."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What all endpoints share; a request may take at most `seconds`."""

    client: AsyncClient
    bodies: Bodies
    instruments: GatewayInstruments
    seconds: float

    async def work(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a request; cancel it when its caller goes."""
        await while_connected(receive, work, self.instruments.aborted)

    def call(self, scope: Scope) -> dict[str, Any]:
        """Options of the client's calls."""
        return {"timeout": self.seconds, "token": scope["state"]["token"]}

    async def in_format(self, request: HttpRequest, format: OutputFormat, scope: Scope) -> HttpRequest:
        """The request, with a grammar where the format of the model's output asks for one.

        Raises:
            Problem: there are tools, and the format of calls is not known, or their parameters are too large.
            OutriderError: the prompt is refused.
        """
        request = in_call_format(request, format.calls)
        if not (format.reasoning and request.chat and request.constrained_by):
            return request
        first = request.requests[0]
        try:
            held = after_reasoning(first, await self._prompt_end(first, scope))
        except InvalidRequest as error:
            raise request.named(error, 0) from None
        return request if held is None else replace(request, requests=(held,), reasons=True)

    async def _prompt_end(self, request: Request, scope: Scope) -> str:
        """The last characters of a conversation's prompt, special tokens included."""
        last = (await self.tokenized(request, scope)).token_ids[-END_TOKENS:]
        options: Any = {"model": request.model, "keep_special_tokens": True, **self.call(scope)}
        return await self.client.detokenize(last, **options)

    async def tokenized(self, request: Request, scope: Scope) -> Tokens:
        """The tokens of a conversation's prompt.

        Raises:
            OutriderError: the prompt is refused.
        """
        options: Any = {name: getattr(request, name) for name in RENDERED}
        return await self.client.tokenize(request.prompt, **options, **self.call(scope))  # type: ignore[arg-type]

    async def events(self, request: HttpRequest, scope: Scope) -> AsyncGenerator[Event, None]:
        """All events of a request; the metrics count them."""
        opened, first, instruments = time.monotonic(), True, self.instruments
        call = self.call(scope) | {name: scope["state"][name] for name in ("request_id", "traceparent")}
        streams = [partial(self._stream, request, index, call) for index in range(len(request.requests))]
        async with aclosing(merged(streams, request.per_prompt)) as events:
            async for event in events:
                if first and isinstance(event, Chunk) and event.token_ids:
                    instruments.first_text.observe(time.monotonic() - opened)
                    first = False
                if isinstance(event, Complete):
                    instruments.completed(event)
                yield event

    async def _stream(
        self, request: HttpRequest, index: int, call: dict[str, Any]
    ) -> AsyncGenerator[Event, None]:
        """The events of one prompt. An error names its field as the caller does."""
        try:
            async with aclosing(self.client.stream(request.requests[index], **call)) as events:
                async for event in events:
                    yield event
        except InvalidRequest as error:
            raise request.named(error, index) from None


@dataclass(frozen=True, slots=True)
class Generating:
    """`/v1/completions` or `/v1/chat/completions`; `parse` makes the request from a body's JSON."""

    resources: Resources
    parse: Callable[[Any], HttpRequest]
    format: OutputFormat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        headers = dict(scope["headers"])
        request = await self.resources.bodies.read(headers, receive, self.parse)
        request = await self.resources.in_format(request, self.format, scope)
        request, progress = continued(request, headers.get(HEADER.encode(), b"").decode("latin-1"))
        progress = progress if wants_ids(headers) else None
        answer = Answer.to(request, scope["state"]["request_id"], int(time.time()), self.format)
        events = self.resources.events(request, scope)
        if request.stream:
            work = send_stream(send, _parts(answer, events, progress, scope["state"]["figures"]))
        else:
            work = self._whole(answer, events, scope, send)
        await self.resources.work(receive, work)

    async def _whole(
        self, answer: Answer, events: AsyncGenerator[Event, None], scope: Scope, send: Send
    ) -> None:
        collected = Collected()
        async with aclosing(events):
            async for event in events:
                collected.add(event)
        prompts = answer.request.requests if answer.request.echo else ()
        echoed = [await self._prompt(one.prompt, scope) for one in prompts]
        found = collected.result().generations
        figures = _metrics(scope["state"]["figures"], [one.end for one in found])
        await send_json(send, 200, answer.finished(found, echoed) | figures)

    async def _prompt(self, prompt: Any, scope: Scope) -> str:
        """A prompt's text. A prompt of token ids is decoded, special tokens included."""
        if isinstance(prompt, str):
            return prompt
        call = self.resources.call(scope)
        try:
            return await self.resources.client.detokenize(prompt, keep_special_tokens=True, **call)
        except InvalidRequest as error:  # of the field of another endpoint
            raise InvalidRequest("echo", error.problem) from None


class Models:
    """`/v1/models` and `/v1/models/{model}`, with the fields of OpenAI's API and of Anthropic's."""

    def __init__(self, client: AsyncClient, instruments: GatewayInstruments) -> None:
        self._client = client
        self._instruments = instruments
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        models = await self._client.models(token=scope["state"]["token"])
        for one in models:
            self._instruments.listed(one.name)
        name = scope.get("path_params", {}).get("model")
        if not name:  # the path may end with a slash
            await send_json(send, 200, self._listed(models))
            return
        found = next((one for one in models if one.name == name), None)
        if found is None:
            raise UnknownModel(name[:200], models[0].name if models else "")
        await send_json(send, 200, self._shown(found))

    def _listed(self, models: Sequence[Model]) -> dict[str, Any]:
        first, last = (models[0].name, models[-1].name) if models else (None, None)
        page = {"has_more": False, "first_id": first, "last_id": last}
        return {"object": "list", "data": [self._shown(one) for one in models], **page}

    def _shown(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "root": model.name,  # vLLM's clients read it
            "max_model_len": model.context_length,
            "type": "model",
            "display_name": model.name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": model.context_length,
            "max_tokens": model.context_length,
        }


async def _parts(
    answer: Answer, events: AsyncGenerator[Event, None], progress: StreamProgress | None, figures: bool
) -> AsyncGenerator[bytes, None]:
    """The part of a stream for each event, which may be empty, and the usage at its end if it is wanted."""
    ends = list[Complete]()
    async with aclosing(events):
        async for event in events:
            ends += [event] if isinstance(event, Complete) else []
            part = answer.part(event, event if progress is None else progress.left(event))
            yield b"" if part is None else server_sent(part, "" if progress is None else progress.id)
    if answer.request.include_usage:
        yield server_sent(answer.usage_part() | _metrics(figures, ends))


def _metrics(wanted: bool, ends: list[Complete]) -> dict[str, Any]:
    return {"metrics": metrics_of(ends)} if wanted else {}
