"""`/v1/responses`: a conversation's next message, generated as a chat completion."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.conversing import Conversing
from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.outgoing.chat_shape import ReadOutput
from orchestrator.gateway.responses.answer import ResponseAnswer
from orchestrator.gateway.responses.output import Output
from orchestrator.gateway.responses.request import ResponseRequest, responses_from

PATH = "/v1/responses"


def responding(resources: Resources, format: OutputFormat) -> Conversing[ResponseRequest]:
    """The endpoint. `format` is that of the model's output."""
    return Conversing(resources, format, responses_from, _begin)


def _begin(request: ResponseRequest, read: ReadOutput | None, state: dict[str, Any]) -> ResponseAnswer:
    id = state["request_id"]
    return ResponseAnswer(id, int(time.time()), request, Output(id, read), state["figures"])
