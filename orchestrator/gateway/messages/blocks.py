"""Turns the content blocks of `/v1/messages` into the messages of a conversation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.messages import bounded, content_of, filled, json_of, parts_of
from orchestrator.gateway.incoming.turns import Turn
from outrider.client import Message, ToolCall

KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Blocks that a message may have, by its role."""
NOTE = "x-anthropic-billing-header"
"""A block of the system prompt that begins so is not for the model. Claude Code sends it first, with a number
that changes each time, so that no beginning of a prompt would ever be found again."""


def turns_of(system: Any, value: Any) -> list[Turn]:
    """The messages of a conversation; the system prompt is the first.

    Messages of users, or of the assistant, that follow each other are one message.

    Raises:
        Problem: there is no message, or one is wrong.
    """
    found = [*_system(system), *chain.from_iterable(values.listed("messages", value, _message))]
    values.bounded("messages", len(found), "blocks")
    turns = list(chain.from_iterable(_joined(role, [*run]) for role, run in groupby(found, _role)))
    if not turns or turns[-1].path == "system":
        raise wrong("messages", "must have at least one message")
    if turns[-1].message.tool_calls:
        raise wrong(turns[-1].path, "has calls without results; send a tool_result for each")
    bounded("messages", [turn.message for turn in turns])
    return turns


def _system(value: Any) -> list[Turn]:
    if not value:
        return []
    content = content_of("system", value, _text)
    if isinstance(content, tuple):
        content = tuple(text for text in content if not text.startswith(NOTE))
    return [Turn(Message("system", content), "system")] if content else []


def _role(turn: Turn) -> str:
    return turn.message.role


def _joined(role: str, turns: Sequence[Turn]) -> Sequence[Turn]:
    """What one side says in one turn as one message; other messages as they are."""
    if len(turns) == 1 or role not in ("user", "assistant"):
        return turns
    all_of = [turn.message for turn in turns]
    joined = Message(
        role=role,
        content=tuple(chain.from_iterable(map(parts_of, all_of))) or "",
        tool_calls=tuple(chain.from_iterable(one.tool_calls for one in all_of)),
        reasoning_content="\n".join(one.reasoning_content for one in all_of if one.reasoning_content),
    )
    return [Turn(joined, turns[0].path)]


def _message(path: str, value: Any) -> list[Turn]:
    """A turn for each block of a message."""
    message = values.members(path, value, {"role", "content"})
    role, content = values.text(f"{path}.role", message.get("role")), message.get("content")
    if role not in KINDS:
        raise wrong(f"{path}.role", f"must be one of {', '.join(KINDS)}")
    if isinstance(content, str):
        return [Turn(Message(role, content), path)]
    blocks = values.listed(f"{path}.content", content, partial(_block, role))
    if not blocks:
        raise wrong(f"{path}.content", "must have at least one block")
    return [Turn(block, path) for block in blocks if block is not None]


def _block(role: str, path: str, value: Any) -> Message | None:
    """The message that a block makes alone; None for reasoning that cannot be read."""
    kind = values.mapping(path, value).get("type")
    if kind not in KINDS[role]:
        known = f"in a message of the role {role} use {' or '.join(KINDS[role])}"
        raise values.wrong_type(path, kind, known)
    match kind:
        case "tool_use":
            return _call(path, value)
        case "tool_result":
            return _result(path, value)
        case "thinking":
            block = values.members(path, value, {"type", "thinking", "signature"})
            text = values.text(f"{path}.thinking", block.get("thinking"))
            return Message(role, reasoning_content=text)
        case "redacted_thinking":
            return None
        case _:
            return Message(role, (_text(path, value),))


def _text(path: str, value: Any) -> str:
    return values.part_of_text(path, value, notes=("cache_control", "citations"))


def _call(path: str, value: Any) -> Message:
    block = values.members(path, value, {"type", "id", "name", "input", "cache_control", "caller"})
    call = ToolCall(
        id=values.text(f"{path}.id", block.get("id")),
        name=filled(f"{path}.name", block.get("name")),
        arguments=json_of(f"{path}.input", values.mapping(f"{path}.input", block.get("input"))),
    )
    return Message("assistant", tool_calls=(call,))


def _result(path: str, value: Any) -> Message:
    """A result. Templates have no place for `is_error`: the model sees only the text."""
    known = {"type", "tool_use_id", "content", "is_error", "cache_control"}
    block = values.members(path, value, known)
    values.flag(f"{path}.is_error", block.get("is_error", False))
    content = content_of(f"{path}.content", block.get("content", ""), _text)
    return Message("tool", content, tool_call_id=values.text(f"{path}.tool_use_id", block.get("tool_use_id")))
