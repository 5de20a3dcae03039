"""Lark grammars of texts that consist only of calls, for callers who require a call.

Names and punctuation are fixed, so a model has no choice there. The arguments follow the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from outrider.client import Tool

WHITESPACE = {"whitespace_pattern": r"\x20"}
"""Between the parts of the arguments there is one space or none."""


def hermes_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Calls between tags; see `hermes`."""
    return _grammar(tools, "arguments", "<tool_call>\n", "\n</tool_call>", "\n" if several else None)


def llama3_grammar(tools: Sequence[Tool], several: bool) -> str:
    """Bare objects; see `llama3`."""
    return _grammar(tools, "parameters", "", "", "; " if several else None)


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
        lines.append(f"a{number}: %json {_schema(tool)}")
    return "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text)


def _schema(tool: Tool) -> str:
    """The schema of the function's parameters as JSON, with `::=` escaped.

    A grammar that contains `::=` would be taken for another notation.
    """
    schema = {"type": "object", **json.loads(tool.parameters or "{}"), "x-guidance": WHITESPACE}
    return json.dumps(schema).replace("::=", r"\u003a:=")
