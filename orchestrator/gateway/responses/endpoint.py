"""`/v1/responses`, generated as a chat completion, and `/v1/responses/input_tokens`."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.gateway.calls.formats import OutputFormat
from orchestrator.gateway.conversing import Conversing, Counting
from orchestrator.gateway.endpoints import Resources
from orchestrator.gateway.outgoing.chat_shape import ReadOutput
from orchestrator.gateway.responses.answer import ResponseAnswer
from orchestrator.gateway.responses.output import Output
from orchestrator.gateway.responses.request import ResponseRequest, responses_from

PATH = "/v1/responses"
COUNT_PATH = f"{PATH}/input_tokens"


def responding(resources: Resources, format: OutputFormat) -> Conversing[ResponseRequest]:
    """`/v1/responses`. `format` is that of the model's output."""
    return Conversing(resources, format, responses_from, _begin)


def counting(resources: Resources) -> Counting:
    """`/v1/responses/input_tokens`, which takes the fields of a request for a response."""
    return Counting(resources, responses_from, {"object": "response.input_tokens"})


def _begin(request: ResponseRequest, read: ReadOutput, state: dict[str, Any]) -> ResponseAnswer:
    id = state["request_id"]
    return ResponseAnswer(id, int(time.time()), request, Output(id, read), state["figures"])
