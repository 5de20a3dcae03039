"""Types of JSON that a function's schema allows for each of its parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.client import Tool

STRING = "string"
MAX_REFERENCES = 16
"""Most references that are followed in a row. They may form a circle."""
CHOICES = ("anyOf", "oneOf")
ALTERNATIVES = (*CHOICES, "allOf")


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's parameters, by name, in order. References are replaced by what they name. A
    parameter of several alternatives has their schemas as alternatives.
    """
    root, found = schema_of(tool), dict[str, list[Any]]()
    for part in _parts(root, root, ALTERNATIVES):
        properties = part.get("properties")
        for name, value in properties.items() if isinstance(properties, dict) else ():
            found.setdefault(name, []).append(_resolved(root, value))
    return {name: values[0] if len(values) == 1 else {"anyOf": values} for name, values in found.items()}


def required_of(tool: Tool) -> set[str]:
    """The names of the parameters that every call has."""
    root = schema_of(tool)
    parts = _parts(root, root, ("allOf",))
    return {name for part in parts for name in _entries(part, "required") if isinstance(name, str)}


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments; empty if it has none."""
    try:
        schema = json.loads(tool.parameters or "{}")
    except (ValueError, RecursionError):
        return {}
    return schema if isinstance(schema, dict) else {}


class ArgumentTypes:
    """Finds the types of parameters of some functions. Each schema is read when its function is called."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._known: dict[str, dict[str, frozenset[str]]] = {}

    def __call__(self, function: str, parameter: str) -> frozenset[str]:
        """The types of a parameter; none if the schema does not say, or the function was not offered."""
        if function not in self._known:
            tool = self._tools.get(function)
            self._known[function] = {} if tool is None else _types_by_name(tool)
        return self._known[function].get(parameter, frozenset())


def _types_by_name(tool: Tool) -> dict[str, frozenset[str]]:
    root = schema_of(tool)
    return {name: types_of(root, schema) for name, schema in parameters_of(tool).items()}


def types_of(root: Mapping[str, Any], schema: Any) -> frozenset[str]:
    """The types that a schema allows; `root` is the schema that its references are in."""
    return frozenset(kind for part in _parts(root, schema, ALTERNATIVES) for kind in _own_types(part))


def words_of(root: Mapping[str, Any], schema: Any) -> list[str]:
    """All values that a schema allows, if they are strings and null, as the model writes them; else none."""
    found: dict[str, None] = {}
    for part in _parts(root, schema, CHOICES):
        if any(name in part for name in CHOICES):
            continue  # its alternatives say it
        values = [None] if part.get("type") == "null" else _values(part)
        if not values or not all(value is None or isinstance(value, str) for value in values):
            return []
        found.update(dict.fromkeys("null" if value is None else value for value in values))
    return list(found)


def _parts(root: Mapping[str, Any], schema: Any, within: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A schema and those in its lists with the names `within`, and in theirs, without references.

    Each is yielded once: callers may send circles with many branches.
    """
    parts, seen = [schema], set[int]()
    for one in parts:
        part = _resolved(root, one)
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            parts += [below for name in within for below in _entries(part, name)]
            yield part


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names, or those of the values that it allows."""
    named = schema.get("type")
    if named is not None:
        return {named} if isinstance(named, str) else set(map(str, _entries(schema, "type")))
    return set(map(_type_of, _values(schema)))


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists; empty: it lists none."""
    return [schema["const"]] if "const" in schema else _entries(schema, "enum")


def _entries(schema: Mapping[str, Any], name: str) -> list[Any]:
    """A list in a schema; empty if it is none."""
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _resolved(root: Mapping[str, Any], schema: Any) -> Any:
    """What a schema's reference within `root` names, or the schema itself."""
    for _ in range(MAX_REFERENCES):
        place = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(place, str) or not place.startswith("#/"):
            return schema
        schema = root
        for name in place[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return STRING
        case list():
            return "array"
        case _:
            return "object"
