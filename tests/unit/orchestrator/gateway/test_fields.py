"""Every field of docs/openai.md and docs/messages.md does what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params as responses

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.fields import (
    CHAT,
    COMPLETIONS,
    COUNTED,
    DETOKENIZE,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
)
from orchestrator.gateway.incoming.requests import chat_from, completions_from
from orchestrator.gateway.messages.request import counted_from, messages_from
from orchestrator.gateway.responses.request import responses_from
from orchestrator.gateway.tokens import detokenize_from, tokenize_from

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = (DOCS / "openai.md").read_text() + (DOCS / "messages.md").read_text()
BASE: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
    "messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "counting": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [1]},
}
KNOWN = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "counting": COUNTED,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}
MAKE: dict[str, Callable[[Any], Any]] = {
    "completions": completions_from,
    "chat": chat_from,
    "responses": responses_from,
    "messages": messages_from,
    "counting": counted_from,
    "tokenize": tokenize_from,
    "detokenize": detokenize_from,
}
INSTEAD = {"prompt": None, **BASE["chat"]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "now"}}]}
FLAT = {"type": "function", "name": "now"}
CUSTOM = {"name": "now", "input_schema": {"type": "object"}}
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("completions", "stream_options"): {"stream": True},
    ("chat", "stream_options"): {"stream": True},
    ("responses", "stream_options"): {"stream": True},
    ("responses", "tool_choice"): {"tools": [FLAT]},
    ("responses", "parallel_tool_calls"): {"tools": [FLAT]},
    ("messages", "tool_choice"): {"tools": [CUSTOM]},
    ("counting", "tool_choice"): {"tools": [CUSTOM]},
    ("chat", "top_logprobs"): {"logprobs": True},
    ("tokenize", "messages"): INSTEAD,
    ("tokenize", "add_generation_prompt"): INSTEAD,
    ("tokenize", "continue_final_message"): INSTEAD,
    ("tokenize", "chat_template_kwargs"): INSTEAD,
    ("tokenize", "tools"): INSTEAD,
    ("chat", "tool_choice"): TOOLS,
    ("chat", "parallel_tool_calls"): TOOLS,
}
"""What else a field needs to mean something."""


EXAMPLES: dict[str, Any] = {
    "model": "target",
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "seed": -1,
    "stop": ["\n", "def"],
    "temperature": 0.7,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": -1.5},
    "max_tokens": 5,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "min_tokens": 2,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "priority": 3,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 8,
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "start: /a+/",
    "structured_outputs": {"regex": "a+"},
    "task": "code",
    "labels": {"team": "search"},
    "speculation": {"mode": "off"},
    "prompt": ["a", "b"],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_completion_tokens": 5,
    "top_logprobs": 3,
    "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "store": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "tokens": [5, 6],
    "user": "somebody",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "somebody",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": False,
    "best_of": 1,
    "suffix": "",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "reasoning_effort": "none",
    "return_token_strs": False,
    "audio": {"voice": "x"},
    "moderation": {"model": "x"},
    "verbosity": "medium",
    "web_search_options": {},
    "chat_template": "x",
    "documents": [{"text": "x"}],
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"crop": True},
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "instructions": "be brief",
    "max_output_tokens": 5,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array"}}},
    "include": ["message.output_text.logprobs"],
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "context_management": [],
    "image": {},
    "background_options": {},
    "background": False,
    "truncation": "disabled",
    "max_tool_calls": 3,
    "access_programs": {},
    "client_metadata": {"thread_id": "x"},
    "system": "be brief",
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": {"type": "array"}},
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {"previous_message_id": None},
    "speed": "standard",
    "mcp_servers": [],
    "container": "c",
    "inference_geo": "eu",
    "thread": {"type": "create"},
}
"""A value that means something, by field."""
OWN_EXAMPLES: dict[tuple[str, str], Any] = {
    ("responses", "tools"): [FLAT],
    ("responses", "prompt"): {"id": "x"},
    **{(one, "tools"): [CUSTOM] for one in ("messages", "counting")},
    **{(one, "tool_choice"): {"type": "none"} for one in ("messages", "counting")},
    **{(one, "context_management"): {"edits": []} for one in ("messages", "counting")},
    ("messages", "max_tokens"): 6,
    ("responses", "reasoning"): {"effort": "none"},
    ("completions", "logprobs"): 3,
    ("chat", "logprobs"): True,
    ("completions", "echo"): True,
    ("chat", "echo"): False,
    ("completions", "add_special_tokens"): True,
    ("chat", "add_special_tokens"): False,
    ("tokenize", "add_special_tokens"): False,
    ("tokenize", "prompt"): "a",
}
"""Of fields that are something else at other endpoints."""
GROUPS = {
    "": ("completions", "chat", "responses"),
    "completions, chat and responses": ("completions", "chat", "responses"),
    "completions and chat": ("completions", "chat"),
    "messages and counting": ("messages", "counting"),
}
WITHOUT_EFFECT = {"ignored": "ignored", "accepted at one value": "only", "refused": "refused"}


def _endpoints(named: str) -> tuple[str, ...]:
    return GROUPS.get(named, (named,))


def _supported() -> Iterator[tuple[str, str, str]]:
    """Endpoint, field and "supported", from the lists: names stand before an entry's colon."""
    for named, entries in re.findall(r"^(?:.* )?Fields of\s+([\w, ]+):\n\n((?:[- ] .*\n)+)", PAGE, re.M):
        for entry in re.split(r"^- ", entries, flags=re.M)[1:]:
            names = re.sub(r"\([^)]*\)", "", entry).partition(":")[0]
            for name in re.findall(r"`(\w+)`", names):
                yield from ((endpoint, name, "supported") for endpoint in _endpoints(named))


def _without_effect() -> Iterator[tuple[str, str, str]]:
    """Endpoint, field and what happens, from the table: `chat: ...; tokenize: ...`."""
    for title, what in WITHOUT_EFFECT.items():
        rows = re.findall(rf"^\| {title} \| (.*) \|$", PAGE, re.M)
        for part in "; ".join(rows).split("; "):
            named, _, names = part.rpartition(": ")
            for name in re.findall(r"`(\w+)`", names):
                yield from ((endpoint, name, what) for endpoint in _endpoints(named))


def _rows() -> list[tuple[str, str, str, Any]]:
    return [
        (endpoint, name, what, OWN_EXAMPLES.get((endpoint, name), EXAMPLES.get(name)))
        for endpoint, name, what in (*_supported(), *_without_effect())
    ]


ROWS = _rows()


def _asked(endpoint: str, **fields: Any) -> Any:
    return MAKE[endpoint]({**BASE[endpoint], **fields})


@pytest.mark.parametrize(("endpoint", "known"), list(KNOWN.items()))
def test_the_page_has_every_field_once(endpoint: str, known: dict[str, Any]) -> None:
    """And no other."""
    assert sorted(name for where, name, _, _ in ROWS if where == endpoint) == sorted(known)


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        ("chat", completion_create_params.CompletionCreateParamsBase),
        ("completions", completions.CompletionCreateParamsBase),
        ("responses", responses.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_openais_client_has_its_row(endpoint: str, params: Any) -> None:
    """Whatever it may send is looked at."""
    assert set(params.__annotations__) <= set(KNOWN[endpoint])


@pytest.mark.parametrize(("endpoint", "name", "what", "example"), ROWS, ids=lambda value: str(value)[:30])
def test_a_field_does_what_its_row_says(endpoint: str, name: str, what: str, example: Any) -> None:
    """Supported ones change what is asked, others do not, and what is refused is named."""
    needs = NEEDS.get((endpoint, name), {})
    plain = _asked(endpoint, **needs)
    match what:
        case "supported":
            assert _asked(endpoint, **{**needs, name: example}) != plain
        case "ignored":
            assert _asked(endpoint, **{name: example}) == plain
        case "only":
            assert _asked(endpoint, **{name: example}) == plain
            assert _refused(endpoint, name, {"another": "value"}) == name
        case "refused":
            assert _refused(endpoint, name, example) == name
        case _:
            pytest.fail(f"{what!r} says nothing that can be checked")


@pytest.mark.parametrize(("endpoint", "name"), [(where, name) for where, name, _, _ in ROWS])
def test_null_is_absent(endpoint: str, name: str) -> None:
    """For every field, as clients send it; but what the endpoint is about there must be."""
    if name in BASE[endpoint]:
        assert _refused(endpoint, name, None) == name
    else:
        assert _asked(endpoint, **{name: None}) == _asked(endpoint)


@pytest.mark.parametrize("endpoint", list(BASE))
def test_an_unknown_field_is_named(endpoint: str) -> None:
    """It might change the text."""
    assert _refused(endpoint, "no_such_field", 1) == "no_such_field"


@pytest.mark.parametrize("body", [[], "x", 3, None])
def test_a_body_is_an_object(body: Any) -> None:
    """And nothing else."""
    with pytest.raises(Problem, match="must be a JSON object"):
        completions_from(body)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        (TOOLS, "tools"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": ["x"]}, "prompt"),
    ],
)
def test_text_and_messages_are_told_apart(fields: dict[str, Any], named: str) -> None:
    """One of both is tokenized, and what is for messages alone does not come with a text."""
    with pytest.raises(Problem) as failure:
        _asked("tokenize", **fields)
    assert failure.value.parameter == named


def _refused(endpoint: str, name: str, value: Any) -> str | None:
    with pytest.raises(Problem) as failure:
        _asked(endpoint, **{name: value})
    assert failure.value.kind.status == 400
    return failure.value.parameter
