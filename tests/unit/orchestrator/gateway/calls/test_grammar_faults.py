"""Mistakes that the service finds in grammars which the gateway wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.gateway.calls.formats import FORMATS
from orchestrator.gateway.calls.reasoning_grammar import after_reasoning
from orchestrator.gateway.incoming.requests import HttpRequest, chat_from, in_call_format
from outrider.protocol.errors import InvalidRequest
from tests.grammars import grammar, matcher

GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}
BAD = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
UNKNOWN = 'Unimplemented keys: ["uniqueItems"]'
OF_TOOL = f"tools: the parameters of 'f1': {UNKNOWN}"
SCHEMA = "response_format.json_schema.schema"


def _tools(*schemas: Any) -> list[Any]:
    functions = ({"name": f"f{at}", "parameters": one} for at, one in enumerate(schemas))
    return [{"type": "function", "function": one} for one in functions]


def _answer(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def _with_reasoning(request: HttpRequest) -> HttpRequest:
    held = after_reasoning(request.requests[0], "")
    assert held is not None
    return replace(request, requests=(held,), reasons=True)


def _problem(request: HttpRequest) -> str:
    """What the caller is told when a verify replica has compiled the grammar."""
    with pytest.raises(InvalidRequest) as caught:
        matcher(grammar(request.requests[0].grammar or ""))
    return str(request.named(InvalidRequest("sampling.grammar", caught.value.problem), 0))


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tools": _tools(GOOD, BAD), "tool_choice": "required"}, OF_TOOL),
        ({"tools": _tools(GOOD, BAD), "response_format": _answer(GOOD)}, OF_TOOL),
        ({"tools": _tools(GOOD), "response_format": _answer(BAD)}, f"{SCHEMA}: {UNKNOWN}"),
    ],
)
def test_a_mistake_is_told_of_the_field_that_has_it(
    format: str, reasons: bool, fields: dict[str, Any], problem: str
) -> None:
    """It names the function, or the schema of the answer, and no line of a grammar that nobody sent."""
    request = chat_from({"messages": [{"role": "user", "content": "x"}], **fields})
    request = in_call_format(request, FORMATS[format])
    assert _problem(_with_reasoning(request) if reasons else request) == problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"response_format": _answer(BAD)}, f"{SCHEMA}: {UNKNOWN}"),
        ({"guided_grammar": "start: a\na: b"}, 'guided_grammar: at line 2, column 4: unknown name: "b"'),
    ],
)
def test_reasoning_before_an_answer_moves_no_mistake(fields: dict[str, Any], problem: str) -> None:
    """A grammar of the caller has its own lines, whatever is put before it."""
    request = chat_from({"messages": [{"role": "user", "content": "x"}], **fields})
    assert _problem(_with_reasoning(request)) == problem
