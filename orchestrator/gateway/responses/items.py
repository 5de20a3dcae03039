"""Turns the input items of `/v1/responses` into the messages of a conversation. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.messages import INSTEAD, bounded, content_of, filled, parts_of
from orchestrator.gateway.incoming.turns import Turn
from outrider.client import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant")
MESSAGE = {"type", "role", "content", "id", "status", "phase"}
CALL = {"type", "call_id", "name", "arguments", "id", "status", "parsed_arguments"}
REASONING = {"type", "id", "status", "summary", "content", "encrypted_content"}
OUTPUT = {"type", "call_id", "output", "name", "id", "status"}
_part = partial(values.part_of_text, kinds=("input_text", "output_text"))
_reasoning_part = partial(values.part_of_text, kinds=("reasoning_text", "text"))


def turns_of(instructions: str, value: Any) -> list[Turn]:
    """The messages of a request's conversation; its instructions are the first message.

    Raises:
        Problem: there is no input, or an item is wrong.
    """
    turns = [Turn(Message(role="system", content=instructions), "instructions")] if instructions else []
    if isinstance(value, str):
        return [*turns, Turn(Message(role="user", content=value), "input")]
    if value is None or value == []:
        raise wrong("input", "is missing; send a string, or a list of items")
    for turn in values.listed("input", value, _turn):
        if turn is not None:
            _append(turns, turn)
    bounded("input", [turn.message for turn in turns])
    return turns


def _append(turns: list[Turn], turn: Turn) -> None:
    """Append a turn. What the assistant wrote in one answer becomes one message: its text joins the reasoning
    before it, a call joins either, and text joins the call before it, whose result comes next."""
    last, new = turns[-1] if turns else None, turn.message
    if last is None or last.message.role != "assistant":
        turns.append(turn)
    elif new.tool_calls:
        calls = (*last.message.tool_calls, *new.tool_calls)
        turns[-1] = replace(last, message=replace(last.message, tool_calls=calls))
    elif new.role == "assistant" and last.message.tool_calls and not new.reasoning_content:
        content = (*parts_of(last.message), *parts_of(new)) if last.message.content else new.content
        turns[-1] = replace(last, message=replace(last.message, content=content))
    elif new.role == "assistant" and _only_reasoning(last.message) and not new.reasoning_content:
        turns[-1] = Turn(replace(new, reasoning_content=last.message.reasoning_content), turn.path)
    else:
        turns.append(turn)


def _only_reasoning(message: Message) -> bool:
    return bool(message.reasoning_content and not message.content and not message.tool_calls)


def _turn(path: str, value: Any) -> Turn | None:
    """The turn of an item; None for reasoning without its text, of which a summary is no part."""
    kind = values.mapping(path, value).get("type")
    match kind:
        case None | "message":
            message = _message(path, values.members(path, value, MESSAGE))
        case "function_call":
            message = _call(path, values.members(path, value, CALL))
        case "function_call_output":
            message = _output(path, values.members(path, value, OUTPUT))
        case "reasoning":
            message = _reasoning(path, values.members(path, value, REASONING))
            return Turn(message, path) if message.reasoning_content else None
        case "item_reference":
            instead = "send the item itself, as clients do that are told store false"
            raise wrong(f"{path}.type", f"nothing is stored that could be referred to; {instead}")
        case _:
            known = "message, reasoning, function_call or function_call_output"
            raise values.wrong_type(path, kind, f"use {known}")
    return Turn(message, path)


def _message(path: str, item: dict[str, Any]) -> Message:
    role = values.text(f"{path}.role", item.get("role"))
    if role not in ROLES:
        raise wrong(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    content = content_of(f"{path}.content", item.get("content"), _part)
    return Message(role=INSTEAD.get(role, role), content=content)


def _reasoning(path: str, item: dict[str, Any]) -> Message:
    """A message of reasoning alone."""
    texts = values.listed(f"{path}.content", item.get("content", []), _reasoning_part)
    return Message(role="assistant", reasoning_content="\n".join(texts))


def _call(path: str, item: dict[str, Any]) -> Message:
    call = ToolCall(
        id=values.text(f"{path}.call_id", item.get("call_id")),
        name=filled(f"{path}.name", item.get("name")),
        arguments=values.text(f"{path}.arguments", item.get("arguments")),
    )
    return Message(role="assistant", content="", tool_calls=(call,))


def _output(path: str, item: dict[str, Any]) -> Message:
    content = content_of(f"{path}.output", item.get("output"), _part)
    return Message(
        role="tool", content=content, tool_call_id=values.text(f"{path}.call_id", item.get("call_id"))
    )
