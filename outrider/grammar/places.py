"""Finds the place of an error in a constraint where the grammar library does not name it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_ATTEMPTS = 256
"""Most parts of a schema that are compiled by themselves to find the wrong one."""
BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = (
    *("items", "additionalProperties", "additionalItems", "propertyNames", "contains"),
    *("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)
ROOTS = ("$defs", "definitions", "$schema")
"""Keys at the root of a schema that its parts may refer to."""
_LARK = re.compile(r"^(?:at )?(\d+)\((\d+)\): (.*)")
_CARET = re.compile(r"^    ( *)\^", re.M)
_REASON = re.compile(r"^error: (.*)$", re.M)
_QUOTED = re.compile(r'invalid regex "(?:[^"\\]|\\.)*" \(in regex\): ')


def find_in_schema(schema: dict[str, Any], problem: str, attempt: Callable[[dict[str, Any]], str]) -> str:
    """A JSON pointer to the smallest part of a schema that has the problem by itself.

    `attempt` compiles a part and returns what is wrong with it.
    """
    roots = {name: schema[name] for name in ROOTS if name in schema}
    left = MAX_ATTEMPTS
    place, part = "#", schema
    found = True
    while found:
        found = False
        for name, child in _children(part):
            left -= 1
            if left < 0:
                return place
            if (
                attempt(child | {root: value for root, value in roots.items() if root not in child})
                == problem
            ):
                place, part, found = f"{place}/{name}", child, True
                break
    return place


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, with their relative pointers; definitions first, because others
    refer to them."""
    for keyword in BY_NAME:
        if isinstance(schema.get(keyword), dict):
            named = schema[keyword].items()
            yield from (
                (f"{keyword}/{_escaped(name)}", part) for name, part in named if isinstance(part, dict)
            )
    for keyword in SINGLE:
        if isinstance(schema.get(keyword), dict):
            yield keyword, schema[keyword]
    for keyword in IN_LISTS:
        if isinstance(schema.get(keyword), list):
            listed = enumerate(schema[keyword])
            yield from ((f"{keyword}/{index}", part) for index, part in listed if isinstance(part, dict))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def find_in_regex(problem: str) -> str:
    """What is wrong with a regular expression, with the character at which it is."""
    reason, caret = _REASON.search(problem), _CARET.search(problem)
    if reason is None or caret is None:
        lines = problem.splitlines()
        return _QUOTED.sub("", _LARK.sub(r"\3", lines[0])) if lines else ""
    return f"at character {len(caret[1]) + 1}: {reason[1]}"


def find_in_grammar(problem: str) -> str:
    """What is wrong with a grammar, with its line and column."""
    lines = problem.splitlines()
    placed = _LARK.match(lines[0]) if lines else None
    if placed is None:
        return ""
    reason = _REASON.search(problem)
    said = f"{placed[3]} {reason[1]}" if reason is not None else placed[3]
    return f"at line {placed[1]}, column {placed[2]}: {said}"
