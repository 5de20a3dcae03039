"""From OpenAI's JSON to the client's requests."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.requests import chat_from, completions_from
from outrider.client import Message, Request

USER = {"role": "user", "content": "hi"}


def _completion(**fields: Any) -> Request:
    return completions_from({"prompt": "x", **fields}).requests[0]


def _chat(**fields: Any) -> Request:
    return chat_from({"messages": [USER], **fields}).requests[0]


def test_defaults_are_those_of_the_openai_api() -> None:
    """Temperature 1; 16 tokens of a completion, and a conversation's answer to the end of the context."""
    assert _completion() == Request(prompt="x", temperature=1.0, max_tokens=16)
    assert _chat() == Request(prompt=(Message("user", "hi"),), chat=True, temperature=1.0)


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
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", "a\nb"),
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
    assert _chat(logprobs=False).logprobs is None


def test_both_names_of_the_longest_answer() -> None:
    """Either, or both when they say the same."""
    assert _chat(max_tokens=3).max_tokens == _chat(max_completion_tokens=3).max_tokens == 3
    assert _chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3


def test_streams() -> None:
    """With their counts where these are asked for."""
    asked = completions_from({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}})
    assert (asked.stream, asked.include_usage) == (True, True)
    assert not completions_from({"prompt": "x", "stream": True}).include_usage


WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt[1]"),
    ({"prompt": ["x", 1]}, "prompt[1]"),
    ({"prompt": [[1], "x"]}, "prompt[1]"),
    ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"n": 0}, "n"),
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
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{**USER, "name": "bob"}]}, "messages[0].name"),
    ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{"type": "function"}]}, "tools"),
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
