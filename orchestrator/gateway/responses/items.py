"""Turns the input items of `/v1/responses` into the messages of a conversation. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.messages import INSTEAD, bounded, content_of, filled
from outrider.client import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant")
MESSAGE = {"type", "role", "content", "id", "status", "phase"}
CALL = {"type", "call_id", "name", "arguments", "id", "status"}
OUTPUT = {"type", "call_id", "output", "name", "id", "status"}
_part = partial(values.part_of_text, kinds=("input_text", "output_text"))


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, and the path of the request's field that it was made from."""

    message: Message
    path: str


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
        _append(turns, turn)
    bounded("input", [turn.message for turn in turns])
    return turns


def _append(turns: list[Turn], turn: Turn) -> None:
    """Append a turn. A call joins the assistant's message before it: the model wrote both in one answer."""
    last = turns[-1].message if turns else None
    if turn.message.tool_calls and last is not None and last.role == "assistant":
        calls = (*last.tool_calls, *turn.message.tool_calls)
        turns[-1] = replace(turns[-1], message=replace(last, tool_calls=calls))
    else:
        turns.append(turn)


def _turn(path: str, value: Any) -> Turn:
    kind = values.mapping(path, value).get("type")
    match kind:
        case None | "message":
            message = _message(path, values.members(path, value, MESSAGE))
        case "function_call":
            message = _call(path, values.members(path, value, CALL))
        case "function_call_output":
            message = _output(path, values.members(path, value, OUTPUT))
        case "item_reference":
            raise wrong(f"{path}.type", "nothing is stored that could be referred to; send the item itself")
        case _:
            known = "message, function_call or function_call_output"
            raise wrong(f"{path}.type", f"{str(kind)[:40]!r} is not supported; use {known}")
    return Turn(message, path)


def _message(path: str, item: dict[str, Any]) -> Message:
    role = values.text(f"{path}.role", item.get("role"))
    if role not in ROLES:
        raise wrong(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    content = content_of(f"{path}.content", item.get("content"), _part)
    return Message(role=INSTEAD.get(role, role), content=content)


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
