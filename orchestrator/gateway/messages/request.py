"""Turns the bodies of `/v1/messages` and `/v1/messages/count_tokens` into chat requests. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.fields import COUNTED, MESSAGES, Sorted, sort_fields
from orchestrator.gateway.incoming.turns import FLAT, ConversationRequest, conversation_of, in_function
from orchestrator.gateway.messages.blocks import turns_of

TOOL = {"type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming"}
NEUTRAL = {"allowed_callers": ["direct"], "defer_loading": False, "input_examples": []}
"""Members of a tool that are accepted at the value that says nothing."""
CHOICE = {"type", "name", "disable_parallel_tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Names that `tool_choice` has in chat requests."""
NAMES = (
    (re.compile(r"^stop(?=\[|$)"), "stop_sequences"),
    (re.compile(r"^continue_final_message$"), "messages"),
    FLAT,
    (re.compile(r"^(tools\[\d+\])\.parameters"), r"\1.input_schema"),
)
"""Patterns that turn names of fields of a chat request into the names of this API."""


def messages_from(body: Any) -> ConversationRequest:
    """What the body of `/v1/messages` asks for.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    fields = sort_fields(body, MESSAGES)
    if "max_tokens" not in fields.own:
        raise wrong("max_tokens", "is missing")
    return _conversation(fields)


def counted_from(body: Any) -> ConversationRequest:
    """The request whose prompt `/v1/messages/count_tokens` counts.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    return _conversation(sort_fields(body, COUNTED))


def _conversation(fields: Sorted) -> ConversationRequest:
    own = fields.own
    turns = turns_of(own.get("system"), own.get("messages"))
    own["reasoning_effort"], answer = own.pop("output_config", (None, None))
    old = own.pop("output_format", None)
    if answer and old:
        raise wrong("output_format", f"cannot be given with {answer.path}")
    own["response_format"] = answer or old
    own["chat_template_kwargs"] = own.get("thinking", {}) | own.get("chat_template_kwargs", {})
    own["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(own.get("tools", []))]
    own |= _choice(own.pop("tool_choice", None))
    if turns[-1].message.role == "assistant":
        fields.options["continue_final_message"] = True
    return conversation_of(fields, turns, NAMES)


def _tool(path: str, value: Any) -> dict[str, Any]:
    """A tool in the form of chat requests."""
    kind = values.mapping(path, value).get("type")
    if kind not in (None, "custom"):
        raise wrong(f"{path}.type", f"{str(kind)[:40]!r} is one of Anthropic's own; use custom")
    said = {name: member for name, member in value.items() if name not in NEUTRAL or member != NEUTRAL[name]}
    tool = values.members(path, said, TOOL)
    values.mapping(f"{path}.input_schema", tool.get("input_schema"))
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {instead: tool[name] for name, instead in names.items() if name in tool}
    return {"type": "function", "function": function}


def _choice(value: Any) -> Mapping[str, Any]:
    """The fields of chat requests that say the same."""
    if value is None:
        return {}
    choice = values.members("tool_choice", value, CHOICE)
    several = not values.flag(
        "tool_choice.disable_parallel_tool_use", choice.pop("disable_parallel_tool_use", False)
    )
    if choice.get("type") == "tool":
        return {"tool_choice": in_function({**choice, "type": "function"}), "parallel_tool_calls": several}
    known = values.members("tool_choice", choice, {"type"}).get("type")
    if not isinstance(known, str) or known not in CHOICES:
        raise wrong("tool_choice.type", f"must be one of {', '.join(CHOICES)}, tool")
    return {"tool_choice": CHOICES[known], "parallel_tool_calls": several}
