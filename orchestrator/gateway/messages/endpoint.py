"""`/v1/messages`, generated as a chat completion, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.conversing import Conversing, Counting
from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.incoming.turns import ConversationRequest
from orchestrator.gateway.messages.answer import MessageAnswer
from orchestrator.gateway.messages.output import Output
from orchestrator.gateway.messages.request import counted_from, messages_from
from orchestrator.gateway.outgoing.chat_shape import ReadOutput

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"


def messaging(resources: Resources, format: OutputFormat) -> Conversing[ConversationRequest]:
    """`/v1/messages`. `format` is that of the model's output."""
    return Conversing(resources, format, messages_from, _begin)


def counting(resources: Resources) -> Counting:
    """`/v1/messages/count_tokens`."""
    return Counting(resources, counted_from, {})


def _begin(_request: ConversationRequest, read: ReadOutput, state: dict[str, Any]) -> MessageAnswer:
    return MessageAnswer(state["request_id"], Output(read), state["figures"])
