"""`/v1/messages`: what its fields and blocks mean to the chat path, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.requests import HttpRequest, chat_from
from orchestrator.gateway.messages.request import counted_from, messages_from
from outrider.client import Message, ToolCall

USER = {"role": "user", "content": "x"}
BODY: dict[str, Any] = {"max_tokens": 5, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANSWER = {"type": "json_schema", "schema": SCHEMA}
TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
CALL = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def _text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _http(**fields: Any) -> HttpRequest:
    return messages_from({**BODY, **fields}).http


def _prompt(*messages: Any, **fields: Any) -> Any:
    return _http(messages=[*messages], **fields).requests[0].prompt


def test_blocks_are_the_messages_of_a_conversation() -> None:
    """The system prompt comes first; results are messages of their own; marks for the cache are left out."""
    answer = [
        {"type": "thinking", "thinking": "Add.", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        _text("Well.", citations=None),
        {**CALL, **CACHED, "caller": {"type": "direct"}},
        {**CALL, "id": "c2", "input": {}},
    ]
    results = [
        {**RESULT, "is_error": True},
        {**RESULT, "tool_use_id": "c2", "content": [_text("4")]},
        {"type": "tool_result", "tool_use_id": "c3"},
        _text("and now?"),
    ]
    found = _prompt(
        {"role": "user", "content": [_text("1 + 2?", **CACHED)]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": results},
        system=[_text("be brief", **CACHED), _text("be kind")],
    )
    calls = (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "{}"))
    assert found == (
        Message("system", ("be brief", "be kind")),
        Message("user", ("1 + 2?",)),
        Message("assistant", ("Well.",), tool_calls=calls, reasoning_content="Add."),
        Message("tool", "3", tool_call_id="c1"),
        Message("tool", ("4",), tool_call_id="c2"),
        Message("tool", "", tool_call_id="c3"),
        Message("user", ("and now?",)),
    )


def test_messages_of_one_side_are_one_message() -> None:
    """As the API says; those of the system are not."""
    said = [{"role": "system", "content": "c"}, {"role": "system", "content": "d"}]
    thought = {"type": "thinking", "thinking": "So."}
    answers = [{"role": "assistant", "content": ""}, {"role": "assistant", "content": [thought, _text("e")]}]
    assert _prompt(USER, {"role": "user", "content": [_text("y")]}, *said, *answers, USER, system="a") == (
        Message("system", "a"),
        Message("user", ("x", "y")),
        Message("system", "c"),
        Message("system", "d"),
        Message("assistant", ("e",), reasoning_content="So."),
        Message("user", "x"),
    )


def test_a_last_message_of_the_assistant_is_continued() -> None:
    """Other conversations are not."""
    begun = _http(messages=[USER, {"role": "assistant", "content": "It is"}]).requests[0]
    assert begun.continue_final_message
    assert not _http().requests[0].continue_final_message


def test_what_is_for_billing_is_not_for_the_model() -> None:
    """It would change the beginning of each prompt."""
    note = _text("x-anthropic-billing-header: cc_version=1; cch=5f;")
    assert _prompt(USER, system=[note, _text("be brief")])[0] == Message("system", ("be brief",))
    assert _prompt(USER, system=[note]) == _prompt(USER, system="") == (Message("user", "x"),)


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": 3, "seed": 7}, {"temperature": 0.5, "top_k": 3, "seed": 7}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"tools": [TOOL]}, {"tools": [FUNCTION]}),
        ({"tools": [{**TOOL, **CACHED, "type": "custom", "strict": True}]}, {"tools": [FUNCTION]}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [FUNCTION]}),
        (
            {
                "tools": [
                    {**TOOL, "allowed_callers": ["direct"], "defer_loading": False, "input_examples": []}
                ]
            },
            {"tools": [FUNCTION]},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tools": [FUNCTION], "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}},
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            {"tools": [FUNCTION], "tool_choice": "none"},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {"output_config": {"format": ANSWER}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (
            {"output_format": ANSWER, "output_config": {"effort": "low"}},
            {
                "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
                "reasoning_effort": "low",
            },
        ),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
            },
            {"tools": [FUNCTION], "tool_choice": "required"},
        ),
    ],
)
def test_fields_mean_what_they_mean_in_chat(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    """The request that is made is the same."""
    expected = chat_from({**BODY, **chat})
    assert replace(_http(**fields), constrained_by="") == replace(expected, constrained_by="")


@pytest.mark.parametrize(
    ("fields", "named", "advice"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"messages": None}, "messages", "must be a list"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [], "system": "x"}, "messages", "at least one"),
        ({"messages": [5]}, "messages[0]", "object"),
        ({"messages": [{**USER, "role": "tool"}]}, "messages[0].role", "one of user, assistant, system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "list"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least one block"),
        ({"messages": [{**USER, "name": "x"}]}, "messages[0].name", "leave it out"),
        ({"messages": [USER, {"role": "user", "content": [5]}]}, "messages[1].content[0]", "object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            "use text or tool_result",
        ),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0].type", "use text"),
        (
            {"messages": [{"role": "user", "content": [{"type": ["x"]}]}]},
            "messages[0].content[0].type",
            "use",
        ),
        (
            {"messages": [{"role": "assistant", "content": [RESULT]}]},
            "messages[0].content[0].type",
            "use text or thinking",
        ),
        (
            {"messages": [{"role": "user", "content": [_text("x", more=1)]}]},
            "messages[0].content[0].more",
            "leave it out",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0].type",
            "use text",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "is_error": 1}]}]},
            "messages[0].content[0].is_error",
            "true or false",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": None}]}]},
            "messages[0].content[0].tool_use_id",
            "string",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**CALL, "input": "{}"}]}]},
            "messages[0].content[0].input",
            "object",
        ),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages[1]", "send a tool_result"),
        ({"messages": [USER] * 4097}, "messages", "at most"),
        ({"messages": [{"role": "user", "content": [_text("x")] * 2100}] * 2}, "messages", "4200"),
        ({"system": 5}, "system", "string"),
        ({"system": [{"type": "image"}]}, "system[0].type", "use text"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type", "use custom"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema", "object"),
        ({"tools": [{**TOOL, "name": None}]}, "tools[0].name", "string"),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description", "string"),
        ({"tools": [{**TOOL, "input_examples": [{"a": 1}]}]}, "tools[0].input_examples", "leave it out"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "leave it out"),
        (
            {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]},
            "tools[0].allowed_callers",
            "leave it out",
        ),
        ({"tools": [FUNCTION]}, "tools[0].type", "use custom"),
        ({"tool_choice": "auto"}, "tool_choice", "object"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "one of auto, any, none, tool"),
        ({"tool_choice": {"type": ["some"]}}, "tool_choice.type", "one of"),
        ({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name", "leave it out"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "send tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "string"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name", "not one of"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
            "true or false",
        ),
        ({"stop_sequences": "x"}, "stop_sequences", "list"),
        ({"stop_sequences": [5]}, "stop_sequences[0]", "string"),
        ({"stop": ["x"]}, "stop", "leave it out"),
        ({"n": 2}, "n", "leave it out"),
        ({"stream_options": {}}, "stream_options", "leave it out"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "one of enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "0 or more"),
        ({"output_config": {"effort": "some"}}, "output_config.effort", "one of"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "object"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema", "object"),
        (
            {"output_format": ANSWER, "output_config": {"format": ANSWER}},
            "output_format",
            "cannot be given with output_config.format.schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "guided_regex": "a"},
            "guided_regex",
            "cannot be given with output_config.format.schema",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            "leave it out",
        ),
        ({"mcp_servers": []}, "mcp_servers", "leave it out"),
        ({"speed": "fast"}, "speed", "leave it out"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], named: str, advice: str) -> None:
    """As the caller called it, with what to do instead."""
    with pytest.raises(Problem, match=advice) as failure:
        _http(**fields)
    assert (failure.value.kind.status, failure.value.parameter) == (400, named)
    assert failure.value.message.startswith(f"{named}: ")


def test_claude_codes_edit_of_nothing_is_accepted() -> None:
    """It keeps all reasoning, as it would be kept without it."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert _http(context_management=edits) == _http()


def test_what_is_counted_is_the_same_prompt() -> None:
    """Without the fields that are about the answer."""
    prompt: Any = {
        "messages": [USER],
        "system": "be brief",
        "tools": [TOOL],
        "thinking": {"type": "disabled"},
    }
    counted = counted_from(prompt).http.requests[0]
    asked = messages_from({**prompt, "max_tokens": 5}).http.requests[0]
    assert replace(counted, max_tokens=5) == asked
    with pytest.raises(Problem, match="max_tokens: is not a field"):
        counted_from({**prompt, "max_tokens": 5})
