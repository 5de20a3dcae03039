"""Turns the body of `/v1/responses` into a chat request. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.fields import RESPONSES, sort_fields
from orchestrator.gateway.incoming.messages import json_of
from orchestrator.gateway.incoming.requests import HttpRequest, chat_of
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
    (re.compile(r"^((?:tools|tool_choice)\b[^f]*)\.function(?=\.|$)"), r"\1"),
)
"""Patterns that turn names of fields of a chat request into the names of this API."""
SPARE_LEVELS = 700
"""Nesting levels kept free for objects around a value, of the thousand that Python's JSON can write."""
MESSAGE = re.compile(r"messages\[(\d{1,4})\]")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One request of `/v1/responses`."""

    http: HttpRequest
    """The same request as a chat request."""
    asked: dict[str, Any]
    """Fields of the request that the response repeats."""
    paths: tuple[str, ...]
    """Path of the field that each message was made from."""

    def named(self, problem: Problem) -> Problem:
        """The problem with the name that its field has here."""
        return _named(problem, self.paths)


def responses_from(body: Any) -> ResponseRequest:
    """What the body of `/v1/responses` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, RESPONSES)
    own = fields.own
    turns = turns_of(own.get("instructions", ""), own.get("input"))
    paths = tuple(turn.path for turn in turns)
    top = own.get("top_logprobs", 0)
    if top or LOGPROBS in own.get("include", ()):
        fields.options["logprobs"] = top
    own["max_tokens"], own["response_format"] = own.get("max_output_tokens"), own.get("text")
    own["reasoning_effort"] = own.get("reasoning")
    own["tools"] = [_nested(tool) for tool in own.get("tools", [])]
    own["tool_choice"] = _choice(own.get("tool_choice"))
    try:
        http = chat_of(fields, tuple(turn.message for turn in turns))
    except Problem as problem:
        raise _named(problem, paths) from None
    for name in ("tools", "tool_choice", "text"):
        _check_depth(name, body.get(name))
    asked = {name: body[name] for name in REPEATED if body.get(name) is not None}
    asked["reasoning"] = {"effort": own.get("reasoning"), "summary": None}
    return ResponseRequest(http, REPEATED | asked, paths)


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
        return _nested(value)
    inside = {name: member for name, member in value.items() if name != "type"}
    if isinstance(inside.get("tools"), list):
        inside["tools"] = [_nested(tool) for tool in inside["tools"]]
    return {"type": "allowed_tools", "allowed_tools": inside}


def _nested(value: Any) -> Any:
    """A function in the form of chat requests: its description is in a member `function`."""
    if not isinstance(value, dict):
        return value
    function = {name: member for name, member in value.items() if name != "type"}
    return {"type": value.get("type"), "function": function}


def _named(problem: Problem, paths: tuple[str, ...]) -> Problem:
    old = problem.parameter
    if old is None:
        return problem
    new = old
    for pattern, instead in NAMES:
        new = pattern.sub(instead, new)
    if found := MESSAGE.match(new):
        new = paths[int(found[1])]
    message = f"{new}: {problem.message.removeprefix(f'{old}: ')}"
    return Problem(problem.kind, message, new, problem.headers)
