"""Lark grammars of texts that consist only of calls, or of calls or an answer in JSON.

Names and punctuation are fixed, so a model has no choice there. The arguments follow the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from orchestrator.gateway.calls.argument_types import (
    STRING,
    parameters_of,
    required_of,
    schema_of,
    types_of,
    words_of,
)
from outrider.client import Tool
from outrider.grammar.compiling import WHITESPACE
from outrider.protocol.constraint import MAX_BYTES

OPTIONS = "x-guidance"
"""Where a schema has options of the grammar library, at its root."""
ONE_SPACE = r"\x20"
"""Between the parts of the arguments there is one space or none."""


def hermes_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Calls between tags; see `hermes`."""
    return _grammar(tools, "arguments", "<tool_call>\n", "\n</tool_call>", "\n" if several else None)


def llama3_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Bare objects; see `llama3`."""
    return _grammar(tools, "parameters", "", "", "; " if several else None)


def tagged_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Calls with tags; see `call_tags`. A string may be any text there, whatever its schema asks for, unless
    it is one of a few."""
    lines = [*_calls(len(tools), "\n" if several else None), "text[lazy]: /(?s:.*)\\n<\\/parameter>\\n/"]
    size = 0
    for line in chain.from_iterable(_tagged_call(number, tool) for number, tool in enumerate(tools)):
        lines.append(line)
        size += len(line)
        if size > MAX_BYTES:  # the service refuses it, and each parameter may repeat a large schema
            break
    return "\n".join(lines)


def _tagged_call(number: int, tool: Tool) -> Iterator[str]:
    """The rules for calls of one function."""
    schema, parameters, required = schema_of(tool), parameters_of(tool), required_of(tool)
    parts = [f"p{number}x{at}{'' if name in required else '?'}" for at, name in enumerate(parameters)]
    head = literal(f"<tool_call>\n<function={tool.name}>\n")
    yield " ".join([f"f{number}:", head, *parts, literal("</function>\n</tool_call>")])
    for at, (name, one) in enumerate(parameters.items()):
        tag = literal(f"<parameter={name}>\n")
        yield f"p{number}x{at}: {tag} {_value(schema, one)}"


def _value(root: Mapping[str, Any], schema: Any) -> str:
    """The rule for a value and the tag after it."""
    end, types = "\n</parameter>\n", types_of(root, schema)
    if words := words_of(root, schema):
        return "(" + " | ".join(literal(word + end) for word in words) + ")"
    if not types or STRING in types:
        return "text"
    part = {**_with_root(root, schema), OPTIONS: root.get(OPTIONS, {})}
    return f"%json {_json(part, ONE_SPACE)} {literal(end)}"


def _with_root(root: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of the schema `root` as a schema of its own: its references name parts of the root."""
    if '"$ref"' not in json.dumps(schema):
        return schema
    part, whole = (json.loads(json.dumps(one), object_hook=_below_root) for one in (schema, root))
    own = part.get("$defs")
    return {**part, "$defs": {**(own if isinstance(own, dict) else {}), "root": whole}}


def _below_root(schema: dict[str, Any]) -> dict[str, Any]:
    place = schema.get("$ref")
    if isinstance(place, str) and place.startswith("#"):
        schema["$ref"] = f"#/$defs/root{place[1:]}"
    return schema


def or_answer(grammar: str, schema: Mapping[str, Any]) -> str:
    """The grammar of texts that follow this grammar of calls, or are JSON of the schema."""
    calls = grammar.replace("start:", "calls:", 1)
    return f"start: calls | answer\n{calls}\nanswer: {json_rule(schema)}"


def json_rule(schema: Mapping[str, Any]) -> str:
    """The rule for JSON of a schema, with spaces and line breaks as in other answers in JSON."""
    return f"%json {_json(schema, WHITESPACE)}"


def _grammar(tools: Sequence[Tool], arguments: str, before: str, after: str, between: str | None) -> str:
    """The grammar of calls that `between` separates; None: exactly one call."""
    lines = _calls(len(tools), between)
    for number, tool in enumerate(tools):
        head = f'{before}{{"name": {json.dumps(tool.name)}, "{arguments}": '
        lines.append(f"f{number}: {literal(head)} a{number} {literal('}' + after)}")
        parameters = {"type": "object", **json.loads(tool.parameters or "{}")}
        lines.append(f"a{number}: %json {_json(parameters, ONE_SPACE)}")
    return "\n".join(lines)


def _calls(functions: int, between: str | None) -> list[str]:
    """The rules for calls of as many functions; see `_grammar`."""
    return [
        "start: call" if between is None else f"start: call ({literal(between)} call)*",
        f"call: ({' | '.join(f'f{number}' for number in range(functions))})",
    ]


def literal(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text)


def _json(schema: Mapping[str, Any], whitespace: str) -> str:
    """A schema as JSON, with `::=` escaped. Options of its own go before the white space.

    A grammar that contains `::=` would be taken for another notation.
    """
    own = schema.get(OPTIONS, {})
    options = {"whitespace_pattern": whitespace, **own} if isinstance(own, Mapping) else own
    text = json.dumps({**schema, OPTIONS: options})
    return text.replace("::=", r"\u003a:=")
