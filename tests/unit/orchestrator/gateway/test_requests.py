"""From OpenAI's JSON to the client's requests."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.calls.call_grammar import or_answer
from orchestrator.gateway.calls.formats import FORMATS
from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming import values
from orchestrator.gateway.incoming.messages import ToolUse
from orchestrator.gateway.incoming.requests import chat_from, completions_from, in_call_format
from orchestrator.request.chat_wire import MAX_MESSAGES, MAX_TOOLS
from orchestrator.request.labels import MAX_LABELS
from outrider.client import Message, Request, Tool, ToolCall
from outrider.protocol.constraint import MAX_CHOICES
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import MAX_ENTRIES

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": 1}'}}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}},
}


def _completion(**fields: Any) -> Request:
    return completions_from({"prompt": "x", **fields}).requests[0]


def _chat(**fields: Any) -> Request:
    return chat_from({"messages": [USER], **fields}).requests[0]


def _allowed(tools: list[Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_defaults_are_those_of_the_openai_api() -> None:
    """Temperature 1; 16 tokens of a completion, and a conversation's answer to the end of the context."""
    assert _completion() == Request(prompt="x", default_temperature=1.0, max_tokens=16)
    assert _chat() == Request(prompt=(Message("user", "hi"),), chat=True, default_temperature=1.0)


@pytest.mark.parametrize(
    "content", ["one\ntwo", [{"type": "text", "text": "one\n"}, {"type": "text", "text": "two"}]]
)
def test_a_prediction_is_a_text(content: Any) -> None:
    """Or parts of one, which follow each other without anything between."""
    assert _chat(prediction={"type": "content", "content": content}).prediction == "one\ntwo"


@pytest.mark.parametrize(
    ("prediction", "named"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
    ],
)
def test_a_wrong_prediction_is_named(prediction: Any, named: str) -> None:
    """By the part that is wrong."""
    with pytest.raises(Problem) as caught:
        _chat(prediction=prediction)
    assert caught.value.parameter == named


def test_parameters_arrive_in_their_options() -> None:
    """Each by its name, with the meanings of OpenAI and vLLM."""
    asked = _completion(
        model="m",
        n=2,
        seed=-1,
        stop="END",
        temperature=0,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"7": 2},
        max_tokens=5,
        logprobs=3,
        top_k=-1,
        min_p=0.05,
        repetition_penalty=1.1,
        ignore_eos=True,
        min_tokens=2,
        stop_token_ids=[4],
        priority=-7,
        task="code",
        labels={"team": "search"},
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        prompt_logprobs=2,
        truncate_prompt_tokens=-1,
        speculation={"mode": "off", "max_nodes": 4, "max_depth": 3},
    )
    assert asked == Request(
        prompt="x",
        model="m",
        n=2,
        seed=2**64 - 1,
        stop=("END",),
        temperature=0.0,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={7: 2.0},
        max_tokens=5,
        logprobs=3,
        top_k=0,
        min_p=0.05,
        repetition_penalty=1.1,
        ignore_eos=True,
        min_tokens=2,
        stop_token_ids=(4,),
        priority=7,
        task="code",
        labels={"team": "search"},
        include_stop=True,
        keep_special_tokens=True,
        prompt_logprobs=2,
        truncate_prompt_tokens=0,
        default_temperature=1.0,
        mode="off",
        max_nodes=4,
        max_depth=3,
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, expected: Any) -> None:
    """One request for each."""
    assert [one.prompt for one in completions_from({"prompt": prompt}).requests] == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, Message("user", "hi")),
        ({"role": "developer", "content": "be brief"}, Message("system", "be brief")),
        (
            {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None},
            Message("assistant", "a"),
        ),
        (
            {"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": None}},
            Message("assistant", "a"),
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", ("a", "b")),
        ),
        ({**USER, "name": "bob"}, Message("user", "hi", name="bob")),
        ({**USER, "type": "text"}, Message("user", "hi")),
        (
            {"role": "assistant", "content": None, "annotations": [], "audio": None, "tool_calls": [CALL]},
            Message("assistant", "", tool_calls=(ToolCall("c1", "now", '{"zone": 1}'),)),
        ),
        (
            {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
            Message("tool", "12:00", tool_call_id="c1"),
        ),
        (
            {"role": "assistant", "content": None, "reasoning": "So.", "reasoning_content": "So."},
            Message("assistant", "", reasoning_content="So."),
        ),
        (
            {"role": "assistant", "content": "Yes.", "reasoning": "So.", "reasoning_content": None},
            Message("assistant", "Yes.", reasoning_content="So."),
        ),
    ],
)
def test_messages_of_every_kind(message: Any, expected: Message) -> None:
    """Parts of text become lines."""
    assert chat_from({"messages": [message]}).requests[0].prompt == (expected,)


def test_log_probabilities_of_conversations() -> None:
    """A switch and a number; the switch alone asks for the tokens' own."""
    assert _chat(logprobs=True).logprobs == 0
    assert _chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert _chat(logprobs=False, top_logprobs=0).logprobs is None
    assert _chat(logprobs=False).logprobs is None


def test_tools_are_shown_and_their_calls_are_looked_for() -> None:
    """Unless none may be called; template variables and a message to continue go along."""
    asked = chat_from({"messages": [USER], "tools": [NOW], "parallel_tool_calls": False})
    assert asked.requests[0].tools == (Tool("now", "Time.", '{"type": "object"}'),)
    assert asked.tools == ToolUse(asked.requests[0].tools, parallel=False)
    none = chat_from({"messages": [USER], "tools": [NOW], "tool_choice": "none"})
    assert (none.requests[0].tools, none.tools) == ((), None)
    given = _chat(chat_template_kwargs={"a": "é"}, continue_final_message=True, add_generation_prompt=False)
    assert given.chat_template_kwargs == '{"a": "é"}'
    assert (given.continue_final_message, given.add_generation_prompt) == (True, False)


def test_templates_are_told_how_much_to_reason() -> None:
    """In the two ways that they know; variables of the caller's own come first."""
    assert _chat(reasoning_effort="high").chat_template_kwargs == (
        '{"reasoning_effort": "high", "enable_thinking": true}'
    )
    own = _chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert own.chat_template_kwargs == '{"reasoning_effort": "none", "enable_thinking": true, "a": 1}'


def test_a_call_may_be_required() -> None:
    """Of any function or of one; then the text is held to the model's format, and errors name the tools."""
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    fields = {"messages": [USER], "tools": [NOW, add]}
    hermes = FORMATS["hermes"]
    assert hermes is not None
    free = chat_from({**fields, "tool_choice": "auto"})
    assert in_call_format(free, hermes) is free
    every = chat_from({**fields, "tool_choice": "required"})
    assert every.tools is not None
    assert [tool.name for tool in every.tools.required] == ["now", "add"]
    held = in_call_format(every, hermes)
    assert held.requests[0].grammar == hermes.grammar(every.tools.required, True)
    assert held.named(InvalidRequest("sampling.grammar", "too large"), 0).field == "tools"
    named = chat_from({**fields, "tool_choice": {"type": "function", "function": {"name": "add"}}})
    assert named.tools is not None
    assert ([tool.name for tool in named.tools.required], named.tools.parallel) == (["add"], False)


def test_a_required_call_has_no_response_format() -> None:
    """Clients send the format of their last answer with every request, so with required calls as well."""
    fields = {"messages": [USER], "tools": [NOW], "tool_choice": "required"}
    assert chat_from({**fields, "response_format": {"type": "json_object"}}) == chat_from(fields)
    held = chat_from({**fields, "tool_choice": "auto", "response_format": {"type": "json_object"}})
    assert held.requests[0].json_object


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_an_answer_in_json_does_not_keep_the_model_from_calls(kind: str) -> None:
    """With tools the text is held to either; an error still names the field of the schema."""
    schema = {"json_object": {"type": "object"}, "json_schema": {"properties": {"a": {}}, "type": "object"}}[
        kind
    ]
    given = {"type": kind} | ({"json_schema": {"schema": schema}} if kind == "json_schema" else {})
    asked = chat_from({"messages": [USER], "tools": [NOW], "response_format": given})
    hermes = FORMATS["hermes"]
    assert hermes is not None
    held = in_call_format(asked, hermes)
    (request,) = held.requests
    assert request.grammar == or_answer(hermes.grammar(asked.requests[0].tools, True), schema)
    assert (request.json_schema, request.json_object) == (None, None)
    assert in_call_format(asked, FORMATS["llama3"]) is asked
    named = held.named(InvalidRequest("sampling.grammar", "too large"), 0)
    assert (named.field or "").startswith("response_format")


@pytest.mark.parametrize("schema", ["{", "3"])
def test_a_schema_beside_tools_must_be_an_object(schema: str) -> None:
    """The error names its field."""
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked = chat_from({"messages": [USER], "tools": [NOW], "response_format": given})
    with pytest.raises(Problem, match="JSON") as raised:
        in_call_format(asked, FORMATS["hermes"])
    assert raised.value.parameter == "response_format.json_schema.schema"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_allowed(mode: str) -> None:
    """The model sees no others; one of them may be called, or has to be."""
    add, sub = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))
    choice = _allowed([sub, add], mode)
    asked = chat_from({"messages": [USER], "tools": [add, NOW, sub], "tool_choice": choice})
    assert [tool.name for tool in asked.requests[0].tools] == ["add", "sub"]
    assert asked.tools is not None
    assert ([tool.name for tool in asked.tools.offered], asked.tools.parallel) == (["add", "sub"], True)
    assert asked.tools.required == (asked.requests[0].tools if mode == "required" else ())


def test_the_best_of_as_many_as_are_shown_are_all() -> None:
    """Clients that ask for several send both numbers; more to choose from are refused."""
    shown = completions_from({"prompt": "x", "n": 2, "best_of": 2})
    assert shown == completions_from({"prompt": "x", "n": 2, "best_of": 1})
    with pytest.raises(Problem, match="1 or n only") as failure:
        completions_from({"prompt": "x", "n": 2, "best_of": 3})
    assert failure.value.parameter == "best_of"


def test_token_ids_with_a_point_are_named() -> None:
    """They are not taken for lists of token ids."""
    with pytest.raises(Problem, match=r"prompt\[0\]: must be a whole number, not 1\.5"):
        completions_from({"prompt": [1.5, 2.5]})


def test_whole_numbers_may_be_written_with_a_point() -> None:
    """Languages that have one kind of number write them so."""
    asked = _completion(max_tokens=10.0, n=2.0, seed=7.0, stop_token_ids=[3.0])
    assert asked == _completion(max_tokens=10, n=2, seed=7, stop_token_ids=[3])
    assert all(type(number) is int for number in (asked.max_tokens, asked.seed, *asked.stop_token_ids))
    bounds = _completion(speculation={"max_nodes": 8.0, "max_depth": 4.0})
    assert all(type(number) is int for number in (bounds.max_nodes, bounds.max_depth))


def test_an_echo_needs_the_log_probabilities_of_the_prompt() -> None:
    """As many as those of the answer, where these are asked for."""
    assert _completion(echo=True, logprobs=2).prompt_logprobs == 2
    assert _completion(echo=True).prompt_logprobs is None
    assert completions_from({"prompt": "x", "echo": True, "logprobs": 2}).prompt_logprobs is False


def test_an_echo_may_ask_for_no_tokens() -> None:
    """One is generated then, as the model computes nothing for none; without echo none is refused later."""
    asked = completions_from({"prompt": "x", "echo": True, "max_tokens": 0})
    assert (asked.requests[0].max_tokens, asked.only_prompt) == (1, True)
    asked = completions_from({"prompt": "x", "max_tokens": 0})
    assert (asked.requests[0].max_tokens, asked.only_prompt) == (0, False)


def test_both_names_of_the_longest_answer() -> None:
    """Either, or both when they say the same."""
    assert _chat(max_tokens=3).max_tokens == _chat(max_completion_tokens=3).max_tokens == 3
    assert _chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3


def test_streams() -> None:
    """With their counts where these are asked for."""
    asked = completions_from({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}})
    assert (asked.stream, asked.include_usage) == (True, True)
    assert not completions_from({"prompt": "x", "stream": True}).include_usage


def test_counts_in_each_part_of_a_stream() -> None:
    """Only beside `include_usage`, as in vLLM."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = completions_from({"prompt": "x", "stream": True, "stream_options": options})
    assert (asked.include_usage, asked.continuous_usage) == (True, True)
    options["include_usage"] = False
    asked = completions_from({"prompt": "x", "stream": True, "stream_options": options})
    assert (asked.include_usage, asked.continuous_usage) == (False, False)


WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt[1]"),
    ({"prompt": ["x", 1]}, "prompt[1]"),
    ({"prompt": [[1], "x"]}, "prompt[1]"),
    ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias[x]"),
    ({"logit_bias": {"5": "y"}}, "logit_bias[5]"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logprobs": True}, "logprobs"),
    ({"top_k": -2}, "top_k"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"speculation": {"mode": "fast"}}, "speculation.mode"),
    ({"speculation": {"depth": 1}}, "speculation.depth"),
    ({"echo": True, "stream": True}, "echo"),
    ({"echo": True, "truncate_prompt_tokens": 3}, "echo"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{**USER, "name": 3}]}, "messages[0].name"),
    ({"messages": [{**USER, "tool_calls": [{"type": "x"}]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{**USER, "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{**USER, "tool_call_id": 7}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "reasoning": 7}]}, "messages[0].reasoning"),
    ({"messages": [{**USER, "reasoning": "a", "reasoning_content": "b"}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{**USER, "type": "image"}]}, "messages[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [[[1]]]}]}, "messages[0].content[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "browser"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [NOW], "tool_choice": _allowed([NOW], mode="none")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [NOW], "tool_choice": _allowed([])}, "tool_choice.allowed_tools.tools"),
    (
        {"tools": [NOW], "tool_choice": _allowed([{"type": "function", "function": {"name": "add"}}])},
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": [NOW], "tool_choice": "required", "guided_regex": "a"},
        "tool_choice",
    ),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"labels": {"team": 3}}, "labels.team"),
    ({"priority": 101}, "priority"),
]


@pytest.mark.parametrize(("fields", "parameter"), WRONG_COMPLETIONS)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], parameter: str) -> None:
    """With its place."""
    with pytest.raises(Problem) as failure:
        completions_from({"prompt": "x", **fields})
    assert failure.value.parameter == parameter
    assert failure.value.message.startswith(f"{parameter}: ")


@pytest.mark.parametrize(("fields", "parameter"), WRONG_CHAT)
def test_a_wrong_field_of_a_conversation_is_named(fields: dict[str, Any], parameter: str) -> None:
    """With its place."""
    with pytest.raises(Problem) as failure:
        chat_from({"messages": [USER], **fields})
    assert failure.value.parameter == parameter


def test_where_a_cache_may_end_changes_nothing() -> None:
    """OpenAI's client marks parts of text so."""
    part = {"type": "text", "text": "hi"}
    marked = part | {"prompt_cache_breakpoint": {"mode": "explicit"}}
    one, other = (_chat(messages=[{"role": "user", "content": [each]}]) for each in (part, marked))
    assert one == other


MANY = values.MAX_ENTRIES + 1
PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * MANY}, "messages"),
        ({"messages": [{"role": "user", "content": [PART] * (MANY // 2)}] * 3}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * (MANY // 2)}] * 3}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * MANY}, "tools"),
        ({"stop": ["x"] * MANY}, "stop"),
        ({"logit_bias": {str(token): 1 for token in range(MANY)}}, "logit_bias"),
        ({"labels": {str(token): "x" for token in range(MANY)}}, "labels"),
        ({"guided_choice": ["x"] * MANY}, "guided_choice"),
    ],
)
def test_more_than_the_service_takes_is_refused_here(fields: dict[str, Any], named: str) -> None:
    """Before it is passed on, which would keep other callers waiting."""
    with pytest.raises(Problem, match="at most 4096") as caught:
        _chat(**fields)
    assert caught.value.parameter == named


def test_what_the_service_takes_is_not_refused_here() -> None:
    """Its own bounds are no larger; of token ids there may be as many as the context has."""
    assert max(MAX_MESSAGES, MAX_TOOLS, MAX_CHOICES, MAX_LABELS, *MAX_ENTRIES.values()) <= values.MAX_ENTRIES
    assert completions_from({"prompt": [1] * MANY}).requests[0].prompt == (1,) * MANY
    with pytest.raises(Problem) as caught:
        completions_from({"prompt": [*[1] * MANY, -1]})
    assert caught.value.parameter == f"prompt[{MANY}]"
