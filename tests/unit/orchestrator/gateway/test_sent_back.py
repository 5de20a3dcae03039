"""What clients keep of an answer and send back with the next turn."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.errors import wrong
from orchestrator.gateway.incoming.requests import chat_from
from orchestrator.gateway.messages.errors import body_of
from orchestrator.gateway.responses.items import turns_of

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
PARSED_CALL = CALL | {"function": {"name": "now", "arguments": "{}", "parsed_arguments": {}}}
PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("plain", "sent"),
    [
        ({"content": "a"}, {"content": "a", "parsed": {"x": 1}}),
        ({"tool_calls": [CALL]}, {"tool_calls": [PARSED_CALL], "content": None}),
        ({"content": [PART]}, {"content": [PART | {"role": "assistant", "refusal": None}]}),
        ({"content": [PART]}, {"content": [PART | {"annotations": []}]}),
        (
            {"content": [PART], "tool_calls": [CALL], "reasoning_content": "so"},
            {
                "content": [PART | {"tool_calls": [CALL], "reasoning_content": "so"}],
                "tool_calls": [CALL],
                "reasoning_content": "so",
            },
        ),
    ],
)
def test_what_openais_clients_add_changes_nothing(plain: dict[str, Any], sent: dict[str, Any]) -> None:
    """What `parse` read out of an answer, and what the Agents SDK repeats in its text."""
    found = [
        chat_from({"messages": [USER, {"role": "assistant", **message}, USER]}) for message in (plain, sent)
    ]
    assert found[0].requests == found[1].requests


def test_what_openais_clients_add_to_a_call_of_a_response_changes_nothing() -> None:
    """The arguments that `responses.parse` and streams read out of it."""
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"a": 1}'}
    assert turns_of("", [call | {"parsed_arguments": {"a": 1}}]) == turns_of("", [call])


def test_tool_runners_of_anthropics_clients_are_told_to_send_everything() -> None:
    """By the code that they look for; other errors have none."""
    refused = body_of(wrong("thread", "is not supported"), "r1")["error"]
    assert refused["details"]["error_code"] == "thread_unsupported_request"
    assert "details" not in body_of(wrong("system", "is wrong"), "r1")["error"]
