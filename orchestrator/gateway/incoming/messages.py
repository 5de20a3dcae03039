"""Turns the messages and tools of an OpenAI request into those of the client. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.values import Reader
from outrider.client import Message, Tool, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTEAD = {"developer": "system"}
"""Old names by newer names of roles: templates know the old ones."""
OWN = "provider_specific_fields"
"""Field of LiteLLM's notes on an answer. It sends them back with the next turn; they are ignored."""
TYPE = "type"
"""Field that lm-evaluation-harness sent with every message until May 2026; it is ignored."""
REASONING = ("reasoning_content", "reasoning")
"""Names of the field that has a message's reasoning: ours, and vLLM's."""
ABOUT_CALLS = ("tool_calls", "tool_call_id")
PARSED = "parsed"
"""Field in which OpenAI's clients put what they read out of an answer. They send it back with the next turn;
it is ignored, as is `parsed_arguments` of a call."""
MESSAGE = {"role", "content", "name", "refusal", "annotations", *ABOUT_CALLS, *REASONING, OWN, TYPE, PARSED}
REPEATED = ("role", "refusal", "annotations", "tool_calls", *REASONING)
"""Fields of an answer that OpenAI's Agents SDK repeats in the part with its text; they are ignored there."""
FUNCTION = {"name", "description", "parameters", "strict"}
NO_CALLS = "none"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions that the answer may call."""

    offered: tuple[Tool, ...]
    parallel: bool = True
    """True when several calls may be passed on; otherwise only the first is."""
    required: tuple[Tool, ...] = ()
    """Functions of which the answer must be calls; empty: the model decides."""


def messages_of(value: Any) -> tuple[Message, ...]:
    """The messages of a conversation.

    Raises:
        Problem: there are none, or one is wrong.
    """
    messages = values.listed("messages", value, _message)
    if not messages:
        raise wrong("messages", "must have at least one message")
    return bounded("messages", messages)


def bounded(path: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages as they are, unless they have too many calls or parts together.

    Raises:
        Problem: they have too many.
    """
    values.bounded(path, sum(len(one.tool_calls) for one in messages), "calls")
    parts = sum(len(one.content) for one in messages if not isinstance(one.content, str))
    values.bounded(path, parts, "parts")
    return tuple(messages)


def chat_options(own: Mapping[str, Any]) -> dict[str, Any]:
    """The client's options for tools and template, read from a request's fields.

    Raises:
        Problem: a field is wrong.
    """
    found: dict[str, Any] = {}
    if tools := _allowed(own.get("tool_choice"), tools_of(own)):
        found["tools"] = tools
    if variables := {**_effort(own.get("reasoning_effort")), **(own.get("chat_template_kwargs") or {})}:
        found["chat_template_kwargs"] = json_of("chat_template_kwargs", variables)
    return found


def _effort(effort: str | None) -> dict[str, Any]:
    """Template variables for an effort; some templates know only the second one."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def tool_use(own: Mapping[str, Any], tools: tuple[Tool, ...]) -> ToolUse | None:
    """The calls that the answer may have; None: it is all text. `tools` are those that are allowed."""
    choice = own.get("tool_choice")
    if _names_several(choice):
        choice = choice["allowed_tools"]["mode"]
    required = _required(choice, tools)
    if not tools:
        return None
    parallel = own.get("parallel_tool_calls", True) and not isinstance(choice, dict)
    return ToolUse(tools, parallel, required)


def _required(choice: Any, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The functions of which one must be called."""
    match choice:
        case None | "auto" | "none":
            return ()
        case "required":
            if not tools:
                raise wrong("tool_choice", "is required, but there are no tools; send tools, or leave it out")
            return tools
        case dict():
            return (_named("tool_choice", choice, tools),)
        case _:
            raise wrong("tool_choice", "must be none, auto, required, or an object that names a function")


def _allowed(choice: Any, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The functions that `tool_choice` allows; the model sees no others."""
    if choice == NO_CALLS:
        return ()
    if not _names_several(choice):
        return tools
    path = "tool_choice.allowed_tools"
    choice = values.members("tool_choice", choice, {"type", "allowed_tools"})
    allowed = values.members(path, choice.get("allowed_tools"), {"mode", "tools"})
    if allowed.get("mode") not in ("auto", "required"):
        raise wrong(f"{path}.mode", "must be auto or required")
    named = values.listed(f"{path}.tools", allowed.get("tools"), lambda at, one: _named(at, one, tools))
    if not named:
        raise wrong(f"{path}.tools", "must name a function; or send tool_choice 'none'")
    return tuple(tool for tool in tools if tool in named)


def _names_several(choice: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _named(path: str, value: Any, tools: tuple[Tool, ...]) -> Tool:
    members = _with_function(path, value)
    function = values.members(f"{path}.function", members.get("function"), FUNCTION)
    name = filled(f"{path}.function.name", function.get("name"))
    for tool in tools:
        if tool.name == name:
            return tool
    raise wrong(f"{path}.function.name", f"{name[:40]!r} is not one of the tools")


def tools_of(own: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The functions that may be called.

    Raises:
        Problem: one is wrong.
    """
    return tuple(values.listed("tools", own.get("tools", []), _tool))


def _tool(path: str, value: Any) -> Tool:
    tool = _with_function(path, value)
    path = f"{path}.function"
    function = values.members(path, tool.get("function"), FUNCTION)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{path}.parameters", "must be an object")
    return Tool(
        name=filled(f"{path}.name", function.get("name")),
        description=values.text(f"{path}.description", function.get("description", "")),
        parameters="" if parameters is None else json_of(f"{path}.parameters", parameters),
    )


def _message(path: str, value: Any) -> Message:
    message = values.members(path, value, MESSAGE)
    for name in ("refusal", "annotations"):
        if message.get(name):
            raise wrong(f"{path}.{name}", "is not supported; leave it out")
    if message.get(TYPE, "text") != "text":
        raise wrong(f"{path}.{TYPE}", "is supported as text only; leave it out")
    role = values.text(f"{path}.role", message.get("role"))
    if role not in ROLES:
        raise wrong(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    calls = tuple(values.listed(f"{path}.tool_calls", message.get("tool_calls", []), _call))
    content = message.get("content", "" if calls or any(map(message.get, REASONING)) else None)
    return Message(
        role=INSTEAD.get(role, role),
        content=content_of(f"{path}.content", content, _part),
        name=values.text(f"{path}.name", message.get("name", "")),
        tool_calls=calls,
        tool_call_id=values.text(f"{path}.tool_call_id", message.get("tool_call_id", "")),
        reasoning_content=_reasoning(path, message),
    )


_part = partial(values.part_of_text, notes=("prompt_cache_breakpoint", *REPEATED))


def _reasoning(path: str, message: Mapping[str, Any]) -> str:
    """A message's reasoning under one of its names; some clients send it under both."""
    given = {name: values.text(f"{path}.{name}", message.get(name, "")) for name in REASONING}
    texts = {text for text in given.values() if text}
    if len(texts) > 1:
        raise wrong(f"{path}.{REASONING[1]}", f"differs from {REASONING[0]}; leave it out")
    return texts.pop() if texts else ""


def _call(path: str, value: Any) -> ToolCall:
    call = _with_function(path, value, "id", "index", default="function")
    known = {"name", "arguments", f"{PARSED}_arguments"}
    function = values.members(f"{path}.function", call.get("function"), known)
    return ToolCall(
        id=values.text(f"{path}.id", call.get("id", "")),
        name=filled(f"{path}.function.name", function.get("name")),
        arguments=values.text(f"{path}.function.arguments", function.get("arguments", "")),
    )


def _with_function(path: str, value: Any, *more: str, default: str | None = None) -> dict[str, Any]:
    """The members of an object about a function. Other types are refused first: they have other members."""
    kind = values.mapping(path, value).get("type")
    kind = default if kind is None else kind
    if kind != "function":
        raise values.wrong_type(path, kind, "use function")
    return values.members(path, value, {"type", "function", *more})


def content_of(path: str, value: Any, part: Reader = values.part_of_text) -> str | tuple[str, ...]:
    """A text, or the texts of its parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(path, "must be a string, or a list of parts of text")
    return tuple(values.listed(path, value, part))


def parts_of(message: Message) -> tuple[str, ...]:
    """The texts of a message's content."""
    if isinstance(message.content, tuple):
        return message.content
    return (message.content,) if message.content else ()


def json_of(path: str, value: Any) -> str:
    """A value as JSON."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise wrong(path, "is nested too deeply") from None


def filled(path: str, value: Any) -> str:
    """A string that is not empty."""
    text = values.text(path, value)
    if not text:
        raise wrong(path, "must not be empty")
    return text
