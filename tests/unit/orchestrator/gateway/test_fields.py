"""Every field of docs/openai.md does what its row says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from orchestrator.gateway.incoming.requests import chat_from, completions_from
from orchestrator.gateway.tokens import detokenize_from, tokenize_from

PAGE = (Path(__file__).resolve().parents[4] / "docs/openai.md").read_text()
ROW = re.compile(
    r"^\| `(\w+)` \| (both|completions|chat|tokenize|detokenize) \| (\w+)[^|]*\| `(.+)` \|$", re.M
)
BASE: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [1]},
}
KNOWN = {"completions": COMPLETIONS, "chat": CHAT, "tokenize": TOKENIZE, "detokenize": DETOKENIZE}
MAKE: dict[str, Callable[[Any], Any]] = {
    "completions": completions_from,
    "chat": chat_from,
    "tokenize": tokenize_from,
    "detokenize": detokenize_from,
}
INSTEAD = {"prompt": None, **BASE["chat"]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "now"}}]}
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("completions", "stream_options"): {"stream": True},
    ("chat", "stream_options"): {"stream": True},
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


def _rows() -> list[tuple[str, str, str, Any]]:
    rows = [(name, where, what, json.loads(example)) for name, where, what, example in ROW.findall(PAGE)]
    return [
        (endpoint, name, what, example)
        for name, where, what, example in rows
        for endpoint in BASE
        if where == endpoint or (where == "both" and endpoint in ("completions", "chat"))
    ]


ROWS = _rows()


def _asked(endpoint: str, **fields: Any) -> Any:
    return MAKE[endpoint]({**BASE[endpoint], **fields})


@pytest.mark.parametrize(("endpoint", "known"), list(KNOWN.items()))
def test_the_page_has_every_field_once(endpoint: str, known: dict[str, Any]) -> None:
    """And no other."""
    assert sorted(name for where, name, _, _ in ROWS if where == endpoint) == sorted(known)


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
