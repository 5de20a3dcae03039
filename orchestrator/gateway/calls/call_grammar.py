"""Lark grammars of texts that consist only of calls, or of calls or an answer in JSON.

Names and punctuation are fixed, so a model has no choice there. The arguments follow the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.client import Tool
from outrider.grammar.compiling import WHITESPACE

ONE_SPACE = r"\x20"
"""Between the parts of the arguments there is one space or none."""


def hermes_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Calls between tags; see `hermes`."""
    return _grammar(tools, "arguments", "<tool_call>\n", "\n</tool_call>", "\n" if several else None)


def llama3_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Bare objects; see `llama3`."""
    return _grammar(tools, "parameters", "", "", "; " if several else None)


def or_answer(grammar: str, schema: Mapping[str, Any]) -> str:
    """The grammar of texts that follow this grammar of calls, or are JSON of the schema."""
    calls = grammar.replace("start:", "calls:", 1)
    return f"start: calls | answer\n{calls}\nanswer: %json {_json(schema, WHITESPACE)}"


def _grammar(tools: Sequence[Tool], arguments: str, before: str, after: str, between: str | None) -> str:
    """The grammar of calls that `between` separates; None: exactly one call."""
    functions = " | ".join(f"f{number}" for number in range(len(tools)))
    lines = [
        "start: call" if between is None else f"start: call ({_literal(between)} call)*",
        f"call: ({functions})",
    ]
    for number, tool in enumerate(tools):
        head = f'{before}{{"name": {json.dumps(tool.name)}, "{arguments}": '
        lines.append(f"f{number}: {_literal(head)} a{number} {_literal('}' + after)}")
        parameters = {"type": "object", **json.loads(tool.parameters or "{}")}
        lines.append(f"a{number}: %json {_json(parameters, ONE_SPACE)}")
    return "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text)


def _json(schema: Mapping[str, Any], whitespace: str) -> str:
    """A schema as JSON, with `::=` escaped.

    A grammar that contains `::=` would be taken for another notation.
    """
    text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": whitespace}})
    return text.replace("::=", r"\u003a:=")
