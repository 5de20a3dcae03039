"""What the text must be: OpenAI's fields and vLLM's become one option of the client."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.requests import HttpRequest, chat_from, completions_from
from outrider.protocol.errors import InvalidRequest

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"z": {}, "a": {}}}
TEXT = '{"type": "object", "properties": {"z": {}, "a": {}}}'


def chat(**fields: Any) -> HttpRequest:
    """A conversation."""
    return chat_from({"messages": HELLO, **fields})


def of_schema(schema: Any, **members: Any) -> dict[str, Any]:
    """OpenAI's format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **members}}


@pytest.mark.parametrize(
    ("fields", "option", "value", "path"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True, "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            *("json_schema", TEXT, "response_format.schema"),
        ),
        (
            {"response_format": of_schema(SCHEMA, strict=False, description="d")},
            *("json_schema", TEXT, "response_format.json_schema.schema"),
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": "any text"}, "json_schema", "any text", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"guided_grammar": "start: x"}, "grammar", "start: x", "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        (
            {"structured_outputs": {"regex": "a+", "json_object": False}},
            "regex",
            "a+",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            *("json_object", True, "structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_becomes_an_option(fields: dict[str, Any], option: str, value: Any, path: str) -> None:
    """Schemas as text, with their properties in order; an error is later said of the field that was sent."""
    for found in (chat(**fields), completions_from({"prompt": "x", **fields})):
        assert getattr(found.requests[0], option) == value
        renamed = found.named(InvalidRequest(f"sampling.{option}", "is wrong"), 0)
        assert str(renamed) == f"{path}: is wrong"
        other = InvalidRequest("sampling.top_p", "is wrong")
        assert found.named(other, 0) is other


def test_the_same_constraint_may_come_twice() -> None:
    """Guidance names it as older and as newer releases of vLLM do, and the backend of the older ones."""
    twice = {"guided_grammar": "g", "structured_outputs": {"grammar": "g"}}
    once = chat(guided_decoding_backend="guidance", **twice).requests[0]
    assert once == chat(guided_grammar="g").requests[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None}},
    ],
    ids=str,
)
def test_no_constraint_is_none(fields: dict[str, Any]) -> None:
    """Plain text, and an object that says nothing."""
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "xml", "root": "a"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": of_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": of_schema(None)}, "response_format.json_schema.schema"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "abc"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], named: str) -> None:
    """The field, or the member of it; two constraints are one too many."""
    with pytest.raises(Problem) as failure:
        chat(**fields)
    assert (failure.value.kind.status, failure.value.parameter) == (400, named)
