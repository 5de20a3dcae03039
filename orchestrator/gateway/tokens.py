"""`/tokenize` and `/detokenize`, as vLLM has them: text to token ids and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.bodies import Bodies
from orchestrator.gateway.conversation import chat_options, messages_of
from orchestrator.gateway.errors import wrong
from orchestrator.gateway.fields import DETOKENIZE, TOKENIZE, sort_fields
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.gateway.sending import Receive, Scope, Send, send_json
from orchestrator.gateway.streams import while_connected
from outrider.client import AsyncClient, Message

FOR_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToTokenize:
    """The body of `/tokenize`."""

    prompt: str | tuple[Message, ...]
    options: dict[str, Any]
    """Options of the client's `tokenize`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToDetokenize:
    """The body of `/detokenize`."""

    tokens: tuple[int, ...]
    model: str


def tokenize_from(body: Any) -> ToTokenize:
    """What the body of `/tokenize` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, TOKENIZE)
    prompt, messages = fields.own.get("prompt"), fields.own.get("messages")
    if prompt is not None and messages is not None:
        raise wrong("messages", "came with a prompt; send one of them")
    if prompt is None and messages is None:
        raise wrong("prompt", "is missing; send a prompt, or messages")
    for name in FOR_MESSAGES if prompt is not None else ():
        if name in fields.options or name in fields.own:
            raise wrong(name, "is for messages; leave it out")
    options = {**fields.options, **chat_options(fields.own)}
    return ToTokenize(prompt=messages_of(messages) if prompt is None else prompt, options=options)


def detokenize_from(body: Any) -> ToDetokenize:
    """What the body of `/detokenize` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, DETOKENIZE)
    if "tokens" not in fields.own:
        raise wrong("tokens", "is missing")
    return ToDetokenize(tokens=fields.own["tokens"], model=fields.options.get("model", ""))


class Converting:
    """What both endpoints have: one body in, one answer out, or the caller goes."""

    def __init__(
        self, client: AsyncClient, bodies: Bodies, instruments: GatewayInstruments, seconds: float
    ) -> None:
        self._client = client
        self._bodies = bodies
        self._instruments = instruments
        self._seconds = seconds

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`/tokenize`."""
        asked = await self._bodies.read(dict(scope["headers"]), receive, tokenize_from)

        async def work() -> None:
            found = await self._client.tokenize(asked.prompt, **self._call(scope), **asked.options)
            answer = {
                "count": found.count,
                "max_model_len": found.context_length,
                "tokens": found.token_ids,
                "token_strs": None,
            }
            await send_json(send, 200, answer)

        if not await while_connected(receive, work()):
            self._instruments.aborted.inc()

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`/detokenize`; special tokens are part of the text."""
        asked = await self._bodies.read(dict(scope["headers"]), receive, detokenize_from)

        async def work() -> None:
            text = await self._client.detokenize(
                asked.tokens, model=asked.model, keep_special_tokens=True, **self._call(scope)
            )
            await send_json(send, 200, {"prompt": text})

        if not await while_connected(receive, work()):
            self._instruments.aborted.inc()

    def _call(self, scope: Scope) -> dict[str, Any]:
        return {"timeout": self._seconds, "token": scope["state"]["token"]}
