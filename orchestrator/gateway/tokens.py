"""`/tokenize` and `/detokenize`, as vLLM has them: text to token ids and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming.fields import DETOKENIZE, TOKENIZE, sort_fields
from orchestrator.gateway.incoming.messages import chat_options, messages_of
from orchestrator.gateway.sending import Receive, Scope, Send, send_json
from outrider.client import Message

FOR_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def tokenize_from(body: Any) -> tuple[str | tuple[Message, ...], dict[str, Any]]:
    """What the body of `/tokenize` asks for: the prompt, and options of the client's `tokenize`.

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
    return messages_of(messages) if prompt is None else prompt, options


def detokenize_from(body: Any) -> tuple[tuple[int, ...], str]:
    """What the body of `/detokenize` asks for: token ids, and the model's name.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, DETOKENIZE)
    if "tokens" not in fields.own:
        raise wrong("tokens", "is missing")
    return fields.own["tokens"], fields.options.get("model", "")


@dataclass(frozen=True, slots=True)
class Converting:
    """Both endpoints; each reads one body and sends one answer."""

    resources: Resources

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`/tokenize`."""
        prompt, options = await self.resources.bodies.read(dict(scope["headers"]), receive, tokenize_from)

        async def work() -> None:
            found = await self.resources.client.tokenize(prompt, **self.resources.call(scope), **options)
            answer = {
                "count": found.count,
                "max_model_len": found.context_length,
                "tokens": found.token_ids,
                "token_strs": None,
            }
            await send_json(send, 200, answer)

        await self.resources.work(receive, work())

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`/detokenize`; special tokens are part of the text."""
        tokens, model = await self.resources.bodies.read(dict(scope["headers"]), receive, detokenize_from)

        async def work() -> None:
            text = await self.resources.client.detokenize(
                tokens, model=model, keep_special_tokens=True, **self.resources.call(scope)
            )
            await send_json(send, 200, {"prompt": text})

        await self.resources.work(receive, work())
