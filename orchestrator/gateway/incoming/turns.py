"""Conversations in the forms of other APIs than chat: their messages, and the names of their fields. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.fields import Sorted
from orchestrator.gateway.incoming.requests import HttpRequest, chat_of
from outrider.client import Message

Patterns = tuple[tuple[re.Pattern[str], str], ...]
FLAT = (re.compile(r"^((?:tools|tool_choice)\b[^f]*)\.function(?=\.|$)"), r"\1")
"""Pattern for APIs whose tools have their name without a member `function` around it; see `in_function`."""
MESSAGE = re.compile(r"messages\[(\d{1,4})\]")


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, and the path of the request's field that it was made from."""

    message: Message
    path: str


@dataclass(frozen=True, slots=True)
class Naming:
    """Turns names of fields of a chat request into the names of another API."""

    patterns: Patterns
    paths: tuple[str, ...]
    """Path of the field that each message was made from."""

    def named(self, problem: Problem) -> Problem:
        """The problem with the name that its field has in the other API."""
        old = problem.parameter
        if old is None:
            return problem
        new = old
        for pattern, instead in self.patterns:
            new = pattern.sub(instead, new)
        if found := MESSAGE.match(new):
            new = self.paths[int(found[1])]
        message = f"{new}: {problem.message.removeprefix(f'{old}: ')}"
        return Problem(problem.kind, message, new, problem.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest:
    """A request for the next message of a conversation."""

    http: HttpRequest
    """The same request as a chat request."""
    naming: Naming


def conversation_of(fields: Sorted, turns: Sequence[Turn], patterns: Patterns) -> ConversationRequest:
    """The request that chat fields and a conversation make; `patterns` name its fields as the caller does.

    Raises:
        Problem: a field is wrong or not supported; it is named.
    """
    naming = Naming(patterns, tuple(turn.path for turn in turns))
    try:
        http = chat_of(fields, tuple(turn.message for turn in turns))
    except Problem as problem:
        raise naming.named(problem) from None
    return ConversationRequest(http=http, naming=naming)


def in_function(value: Any) -> Any:
    """A function in the form of chat requests: its description is in a member `function`."""
    if not isinstance(value, dict):
        return value
    function = {name: member for name, member in value.items() if name != "type"}
    return {"type": value.get("type"), "function": function}
