"""`/v1/messages`, generated as a chat completion, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.conversing import Conversing
from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.incoming.turns import ConversationRequest
from orchestrator.gateway.messages.answer import MessageAnswer
from orchestrator.gateway.messages.output import Output
from orchestrator.gateway.messages.request import counted_from, messages_from
from orchestrator.gateway.outgoing.chat_shape import ReadOutput
from orchestrator.gateway.sending import Receive, Scope, Send, problem_from, send_json

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"


def messaging(resources: Resources, format: OutputFormat) -> Conversing[ConversationRequest]:
    """`/v1/messages`. `format` is that of the model's output."""
    return Conversing(resources, format, messages_from, _begin)


def _begin(_request: ConversationRequest, read: ReadOutput | None, state: dict[str, Any]) -> MessageAnswer:
    return MessageAnswer(state["request_id"], Output(read), state["figures"])


@dataclass(frozen=True, slots=True)
class Counting:
    """`/v1/messages/count_tokens`."""

    resources: Resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request = await self.resources.bodies.read(dict(scope["headers"]), receive, counted_from)

        async def work() -> None:
            try:
                found = await self.resources.tokenized(request.http.requests[0], scope)
            except Exception as error:
                raise request.naming.named(problem_from(error)) from None
            await send_json(send, 200, {"input_tokens": found.count})

        await self.resources.work(receive, work())
