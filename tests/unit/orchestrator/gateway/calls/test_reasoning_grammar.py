"""Constrained answers with reasoning before them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.calls.reasoning_grammar import after_reasoning
from outrider.client import Message, Request
from tests.grammars import accepts

BEGUN, PLAIN = "<|assistant|><think>\n", "<|assistant|>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK = "item: /[0-9]+;/\nstart : item+"
CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"json_object": True}, '{"b": [1]}', "[1]"),
    ({"json_schema": SCHEMA}, '{"a": 1}', '{"a": "x"}'),
    ({"json_schema": '{"enum": ["a::=b"]}'}, '"a::=b"', '"b"'),
    ({"regex": "a/b\\\\/\nc|d\\/e"}, "a/b\\/\nc", "a/b"),
    ({"regex": "a/b|d\\/e"}, "d/e", "d"),
    ({"regex": "https?://[a-z/]+/x"}, "http://a/b/x", "http:/a/x"),
    ({"regex": "a\\\nb\\n//c"}, "a\nb\n//c", "a"),
    ({"choice": ("yes", 'n"o')}, 'n"o', "maybe"),
    ({"grammar": LARK}, "1;23;", "1"),
    ({"grammar": '?start: "a" | "b" // }'}, "b", "c"),
    ({"grammar": '  start[capture]: "{" A "}"\n  A: "a"'}, "{a}", "{b}"),
    ({"grammar": 'start: "(" start ")" | "x"'}, "((x))", "(x"),
]


def _grammar(prompt_end: str, **constraint: Any) -> str:
    request = Request(prompt=(Message("user", "x"),), chat=True, **constraint)
    found = after_reasoning(request, prompt_end)
    assert found is not None
    assert (found.json_object, found.json_schema, found.regex, found.choice) == (None, None, None, ())
    assert found.grammar is not None
    return found.grammar


@pytest.mark.parametrize(("constraint", "good", "bad"), CONSTRAINTS)
def test_the_answer_follows_its_constraint(constraint: dict[str, Any], good: str, bad: str) -> None:
    """Behind reasoning of any kind, which may be missing unless it has begun."""
    begun, plain = _grammar(BEGUN, **constraint), _grammar(PLAIN, **constraint)
    for rest in ("</think>", "\nIs <b> {1}?\n\nNo.</think>\n\n", f"{bad} </thin></think> "):
        assert accepts(begun, rest + good)
        assert accepts(plain, f"<think>{rest}{good}")
        assert not accepts(begun, rest + bad)
        assert not accepts(plain, f"<think>{rest}{bad}")
    assert accepts(plain, good)
    assert not accepts(plain, bad)
    assert not accepts(begun, good)
    assert not accepts(plain, "<think>" + good)


def test_a_grammar_that_refers_to_its_start_allows_no_more_reasoning() -> None:
    """There is reasoning before the answer only, and not within it."""
    source = _grammar(PLAIN, grammar='start: "(" start ")" | "x"')
    assert accepts(source, "<think></think>(x)")
    assert not accepts(source, "(<think></think>x)")


def test_a_template_may_leave_the_reasoning_out() -> None:
    """The constraint holds from the first token on."""
    request = Request(prompt="x", json_object=True)
    assert after_reasoning(request, "<|assistant|><think>\n\n</think>\n\n") is None


@pytest.mark.parametrize(
    "constraint",
    [
        {"grammar": 'root ::= "a"'},
        {"regex": "a::=b"},
        {"json_schema": "{"},
        {"regex": ""},
        {"choice": ("a", "")},
    ],
)
def test_what_cannot_be_part_of_a_grammar_stays_as_it_is(constraint: dict[str, Any]) -> None:
    """The service takes it, or says what is wrong with it."""
    assert after_reasoning(Request(prompt="x", **constraint), PLAIN) is None
