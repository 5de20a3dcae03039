"""Conversations as callers write them: as `Message`s, or as mappings in the OpenAI API's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.protocol.errors import InvalidRequest

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's message made; `arguments` are the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` are a JSON schema as text, or empty."""

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; the role is system, user, assistant, tool or another.

    `content` is a text, or parts of text. `tool_calls` are the calls that an assistant's message made;
    `tool_call_id` names the call whose result a message of the role tool holds. `reasoning_content` is what
    an assistant wrote before its answer.
    """

    role: str
    content: str | tuple[str, ...] = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning_content: str = ""


Conversation: TypeAlias = Sequence[Message] | Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Tool] | Sequence[Mapping[str, Any]]


def message_of(path: str, value: Any) -> Message:
    """A message, from a `Message` or from a mapping with `role` and `content`.

    Raises:
        InvalidRequest: it is neither; `path` names it.
    """
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping) or "role" not in value or not set(value) <= {*MESSAGE_KEYS}:
        raise InvalidRequest(path, f"must be a token id, or a message: {', '.join(MESSAGE_KEYS)}")
    calls = value.get("tool_calls") or ()
    return Message(
        role=value["role"],
        content=_content(f"{path}.content", value.get("content")),
        name=value.get("name") or "",
        tool_calls=tuple(_call(f"{path}.tool_calls[{number}]", call) for number, call in enumerate(calls)),
        tool_call_id=value.get("tool_call_id") or "",
        reasoning_content=value.get("reasoning_content") or "",
    )


def tool_of(path: str, value: Any) -> Tool:
    """A tool, from a `Tool` or from a mapping `{"type": "function", "function": {...}}`.

    Raises:
        InvalidRequest: it is neither; `path` names it.
    """
    if isinstance(value, Tool):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise InvalidRequest(path, "must be a Tool, or a function with a name")
    parameters = function.get("parameters")
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else json_text(f"{path}.parameters", parameters),
    )


def json_text(path: str, value: Any) -> str:
    """A value as JSON text; a value that is a text is taken to be JSON already.

    Raises:
        InvalidRequest: the value cannot be written as JSON.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(path, "must be a value that JSON can express") from None


def _content(path: str, value: Any) -> str | tuple[str, ...]:
    if value is None or isinstance(value, str):
        return value or ""
    wrong = InvalidRequest(path, "must be a text, or parts of text")
    if isinstance(value, Mapping):  # otherwise its keys would become the parts
        raise wrong
    try:
        return tuple(part if isinstance(part, str) else part["text"] for part in value)
    except (TypeError, KeyError):
        raise wrong from None


def _call(path: str, value: Any) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise InvalidRequest(path, "must be a ToolCall, or a function with a name and arguments")
    arguments = json_text(f"{path}.arguments", function.get("arguments") or "{}")
    return ToolCall(value.get("id") or "", function["name"], arguments)
