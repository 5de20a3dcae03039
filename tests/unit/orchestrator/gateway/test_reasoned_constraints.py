"""Requests that constrain the answer of a model that reasons, against a fake orchestrator.

Its prompts are the texts of the messages, so that a message can end as a template would.
"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.calls.formats import FORMATS, OutputFormat
from outrider.protocol.constraint import MAX_BYTES
from outrider.protocol.errors import InvalidRequest
from tests.grammars import accepts
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FORMAT = OutputFormat(FORMATS["hermes"], reasoning=True)
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def _post(fake: FakeOrchestrator, path: str, body: Any) -> Response:
    return posted(fake.endpoint, path, body, format=FORMAT)


def _chat(fake: FakeOrchestrator, content: str, **fields: Any) -> Response:
    return _post(fake, CHAT, {"messages": [{"role": "user", "content": content}], **fields})


@pytest.mark.parametrize("content", ["hello", "hello<think>"])
def test_an_answer_in_json_comes_behind_reasoning(fake: FakeOrchestrator, content: str) -> None:
    """The grammar knows whether the prompt has begun the reasoning, and the answer is without it."""
    begun = content.endswith(">")
    fake.prompt_end, fake.texts = content, {11: "" if begun else "<think>", 12: "So.</think>\n", 13: "{}"}
    answer = _chat(fake, content, response_format={"type": "json_object"})
    message = answer.json["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("{}", "So.")
    sampling = fake.requests[-1].sampling
    assert sampling.WhichOneof("constraint") == "grammar"
    assert accepts(sampling.grammar, "So.</think>\n{}") == begun
    assert accepts(sampling.grammar, "<think>So.</think>\n{}")
    assert accepts(sampling.grammar, "{}") != begun


def test_a_required_call_comes_behind_reasoning(fake: FakeOrchestrator) -> None:
    """It may also come at once."""
    fake.texts = {11: "<think>So.</think>", 12: CALL}
    answer = _chat(fake, "hello", tools=TOOLS, tool_choice="required")
    choice = answer.json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "So.")
    grammar = fake.requests[-1].sampling.grammar
    assert accepts(grammar, f"<think>So.</think>{CALL}")
    assert accepts(grammar, CALL)
    assert not accepts(grammar, "<think>So.</think>No.")


def test_a_response_in_json(fake: FakeOrchestrator) -> None:
    """By the newer API."""
    fake.texts = {11: "<think>So.</think>", 12: "{}"}
    answer = _post(fake, RESPONSES, {"input": "hello", "text": {"format": {"type": "json_object"}}})
    reasoning, message = answer.json["output"]
    assert reasoning["content"][0]["text"] == "So."
    assert message["content"][0]["text"] == "{}"


def test_a_grammar_in_gbnf_holds_from_the_first_token_on(fake: FakeOrchestrator) -> None:
    """It cannot be part of another, so all of the output is the answer."""
    fake.prompt_end, fake.texts = "<think>", {11: "one"}
    answer = _chat(fake, "hello<think>", guided_grammar='root ::= "one"')
    assert answer.json["choices"][0]["message"]["content"] == "one"
    assert fake.requests[-1].sampling.grammar == 'root ::= "one"'


@pytest.mark.parametrize("schema", ["{", '{"a": ' * 2000 + "1" + "}" * 2000, '"' + "x" * MAX_BYTES + '"'])
def test_a_constraint_that_is_wrong_is_passed_on(fake: FakeOrchestrator, schema: str) -> None:
    """The service says what is wrong with it."""
    assert _chat(fake, "hello", guided_json=schema).status == 200
    assert fake.requests[-1].sampling.json_schema == schema


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "guided_regex": "a"}, "messages"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_object"}}}, "input"),
    ],
)
def test_a_prompt_that_is_refused_is_named(fake: FakeOrchestrator, path: str, body: Any, named: str) -> None:
    """As the caller calls it, though it is looked at before the request is sent."""
    fake.error = InvalidRequest("chat.messages", "the template refuses them")
    answer = _post(fake, path, body)
    assert (answer.status, answer.error["param"]) == (400, named)
