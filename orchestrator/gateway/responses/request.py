"""Turns the body of `/v1/responses` into a chat request. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.incoming.fields import RESPONSES, sort_fields
from orchestrator.gateway.incoming.messages import json_of
from orchestrator.gateway.incoming.turns import FLAT, ConversationRequest, conversation_of, in_function
from orchestrator.gateway.responses.items import turns_of

LOGPROBS = "message.output_text.logprobs"
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
}
"""Fields of the request that a response repeats, with their values when the request leaves them out."""
NAMES = (
    (re.compile(r"^max_tokens$"), "max_output_tokens"),
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"^tool_choice\.allowed_tools"), "tool_choice"),
    FLAT,
)
"""Patterns that turn names of fields of a chat request into the names of this API."""
SPARE_LEVELS = 700
"""Nesting levels kept free for objects around a value, of the thousand that Python's JSON can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ConversationRequest):
    """One request of `/v1/responses`."""

    asked: dict[str, Any]
    """Fields of the request that the response repeats."""


def responses_from(body: Any) -> ResponseRequest:
    """What the body of `/v1/responses` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, RESPONSES)
    own = fields.own
    turns = turns_of(own.get("instructions", ""), own.get("input"))
    top = own.get("top_logprobs", 0)
    if top or LOGPROBS in own.get("include", ()):
        fields.options["logprobs"] = top
    own["max_tokens"], own["response_format"] = own.get("max_output_tokens"), own.get("text")
    own["reasoning_effort"] = own.get("reasoning")
    own["tools"] = [in_function(tool) for tool in own.get("tools", [])]
    own["tool_choice"] = _choice(own.get("tool_choice"))
    found = conversation_of(fields, turns, NAMES)
    for name in ("tools", "tool_choice", "text"):
        _check_depth(name, body.get(name))
    asked = {name: body[name] for name in REPEATED if body.get(name) is not None}
    asked["reasoning"] = {"effort": own.get("reasoning"), "summary": None}
    return ResponseRequest(http=found.http, naming=found.naming, asked=REPEATED | asked)


def _check_depth(name: str, value: Any) -> None:
    """Raise Problem when a value that the response repeats is nested too deeply.

    It is passed between processes and written within other objects, so it may not be as deep as a value that
    can just be read.
    """
    for _ in range(SPARE_LEVELS):
        value = [value]
    json_of(name, value)


def _choice(value: Any) -> Any:
    """A `tool_choice` in the form of chat requests."""
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        return in_function(value)
    inside = {name: member for name, member in value.items() if name != "type"}
    if isinstance(inside.get("tools"), list):
        inside["tools"] = [in_function(tool) for tool in inside["tools"]]
    return {"type": "allowed_tools", "allowed_tools": inside}
