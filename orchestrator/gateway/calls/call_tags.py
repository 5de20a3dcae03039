"""One call, written with tags, as Qwen 3 Coder and Qwen 3.5 do.

    <function=NAME> <parameter=KEY> value </parameter> ... </function>

A value is text between two line breaks, and the function's schema says what it is: a string, or JSON. It may
have `</parameter>` in it: only the one before another tag ends it. The arguments are passed on as JSON, a
parameter at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from orchestrator.gateway.calls.argument_types import STRING
from orchestrator.gateway.calls.call_object import SPACE, CallState
from orchestrator.gateway.calls.hermes import END

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME = 512
"""Most characters of a name. A tag is read again with each of them."""
PYTHON = {"True": "true", "False": "false", "None": "null"}
"""JSON of words that models write as in Python."""

Types = Callable[[str, str], frozenset[str]]
"""The types of JSON that a function's schema allows for a parameter; none if it does not say."""


class CallTags:
    """Takes the characters of one call, from its first tag on; see `CallObject`."""

    def __init__(self, types: Types) -> None:
        self.state = CallState.OPEN
        self.name = ""
        self._types = types
        self._tag = ""
        """The tag that is being read, as far as it has come."""
        self._key: str | None = None
        """Key of the parameter that is being read; None before the first."""
        self._value: list[str] = []
        """Characters of its value, and of what came after it."""
        self._length: int | None = None
        """Characters of the value, if a tag that may end it has come."""
        self._seen: set[str] = set()
        self._arguments: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether it is certain that this is a call: it has a name."""
        return bool(self.name)

    def take(self) -> str:
        """JSON text of the arguments that have come since the last `take`."""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def push(self, character: str) -> None:
        """Take the next character."""
        if self._key is not None:
            self._value.append(character)
        if self._key is not None and self._length is None:
            self._in_value(character)
        elif self._tag or character not in SPACE:
            self._in_tag(self._tag + character)

    def _in_tag(self, tag: str) -> None:
        """Read a tag, up to the character that ends it or shows that it is none."""
        self._tag = tag
        opening, *ends = (PARAMETER, FUNCTION_END, END) if self.name else (FUNCTION,)
        if tag in ends:
            self._end_parameter()
            self._arguments.append("}" if self._seen else "{}")
            self.state = CallState.DONE
        elif tag.startswith(opening):
            if tag == opening:
                self._end_parameter()
            self._in_name(tag.removeprefix(opening))
        elif not any(known.startswith(tag) for known in (opening, *ends)):
            self._no_tag()

    def _no_tag(self) -> None:
        """What has come is no tag: it belongs to the value before, or this is no call."""
        if self._key is None:
            self.state = CallState.BROKEN
        self._tag, self._length = "", None

    def _in_name(self, named: str) -> None:
        """Read a tag behind its `=`: a name, which is on one line, and the end."""
        if named == ">" or named.endswith("\n") or len(named) > MAX_NAME:
            self.state = CallState.BROKEN
        elif named.endswith(">"):
            self._tag, name = "", named[:-1]
            self._key, self.name = (name, self.name) if self.name else (None, name)

    def _in_value(self, character: str) -> None:
        end = len(PARAMETER_END)
        if character == ">" and "".join(self._value[-end:]) == PARAMETER_END:
            self._length = len(self._value) - end

    def _end_parameter(self) -> None:
        """Write the parameter, if there is one. Of two with the same name the first counts."""
        key, value = self._key, "".join(self._value[: self._length])
        self._key, self._value, self._length = None, [], None
        if key is None or key in self._seen:
            return
        value = value.removeprefix("\n").removesuffix("\n")
        before = ", " if self._seen else "{"
        self._seen.add(key)
        types = self._types(self.name, key)
        self._arguments.append(f"{before}{json.dumps(key, ensure_ascii=False)}: {_written(value, types)}")


def _written(value: str, types: frozenset[str]) -> str:
    """JSON text of a value. What is no JSON is passed on as a string, for the caller to refuse."""
    word = PYTHON.get(value.strip(), value.strip())
    if word == "null" and "null" in types:
        return word
    if types and STRING not in types:
        try:
            json.loads(word, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            return word
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
