"""One call, written as a JSON object with the members `name` and `arguments` (or `parameters`).

It is read character by character, because the arguments are passed on before they end. The object is checked
only as far as finding them needs; the caller has to check the arguments themselves.
"""

from __future__ import annotations

import json
from enum import Enum, auto

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


class CallState(Enum):
    """How far the object has been read."""

    OPEN = auto()
    """The end of the object has not come."""
    DONE = auto()
    """The object has ended, and is a call."""
    BROKEN = auto()
    """The text is no call."""


class CallObject:
    """Takes the characters of one object, from its first brace on. `name` is known once `begun` is true."""

    def __init__(self) -> None:
        self.state = CallState.OPEN
        self.name = ""
        self._arguments: list[str] = []
        """Characters of the arguments that have not been taken yet. They are kept until the name is known."""
        self._named = self._argued = False
        self._arguments_begun = False
        """True once a character of the arguments has come that is not a space."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        """Key of the member whose value is being read; None before a value."""
        self._value: list[str] = []
        """JSON text of a key or of the value of `name`, as far as it has come, in characters."""

    @property
    def begun(self) -> bool:
        """Whether it is certain that this is a call: it has a name, and arguments have begun."""
        return self._named and self._argued

    def take(self) -> str:
        """The arguments that have come since the last `take`. Call it only once `begun` is true."""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def push(self, character: str) -> None:
        """Take the next character."""
        if self._in_string:
            self._string(character)
        elif self._depth == 0:
            self._depth, self.state = (1, CallState.OPEN) if character == "{" else (0, CallState.BROKEN)
        elif self._key is None:
            self._before_value(character)
        else:
            self._in_value(character)

    def _string(self, character: str) -> None:
        self._keep(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _before_value(self, character: str) -> None:
        """Read a key, its colon, or the object's end."""
        if character == '"' and not self._value:
            self._in_string = True
            self._keep(character)
        elif character == ":" and self._value:
            self._key, self._value = self._member(_text(self._value)), []
        elif character == "}" and not self._value:
            self._end()
        elif character not in SPACE:
            self.state = CallState.BROKEN

    def _in_value(self, character: str) -> None:
        """Read a value of any kind, up to the comma or brace that ends it."""
        if self._depth == 1 and character in ",}":
            self._end_member()
            if character == "}":
                self._end()
            return
        self._depth += (character in "{[") - (character in "]}")
        self._in_string = character == '"'
        if self._depth < 1:
            self.state = CallState.BROKEN
        self._keep(character)

    def _member(self, key: str) -> str:
        """The key, or an empty string when there was such a member before."""
        if key in ARGUMENTS:
            key = "" if self._argued else key
            self._argued = True
        return "" if key == "name" and self._named else key

    def _keep(self, character: str) -> None:
        if self._key in ARGUMENTS:
            self._arguments_begun = self._arguments_begun or character not in SPACE
            self._arguments += [character] if self._arguments_begun else []
        elif self._key in (None, "name"):
            self._value.append(character)

    def _end_member(self) -> None:
        if self._key == "name":
            self.name = _text(self._value)
            self._named = bool(self.name)
            if not self.name:
                self.state = CallState.BROKEN
        self._key, self._value = None, []

    def _end(self) -> None:
        if self.state is CallState.OPEN:
            self.state = CallState.DONE if self.begun else CallState.BROKEN


def _text(written: list[str]) -> str:
    """The text of a JSON string; empty when what was written is not a JSON string."""
    try:
        value = json.loads("".join(written))
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
