"""The largest messages that the wire lets in: refused by their lengths, before anything is made of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from orchestrator.request.chat_wire import MAX_MESSAGES, MAX_NAME, MAX_ROLE, MAX_TOOLS
from orchestrator.request.wire import check_lengths, incoming_from_pb
from outrider.protocol.errors import ContextTooLong, InvalidRequest
from outrider.v1 import generation_pb2
from tests.unit.orchestrator.request.test_resolver import ask

POSITIONS, BYTES_PER_TOKEN = 2048, 82
LARGEST = 8 << 20
"""Bytes of a message."""
SECONDS = 0.5
"""Processor time of a refusal: a few milliseconds, and room for a busy machine."""


def conversation(*messages: tuple[str, str]) -> generation_pb2.Chat:
    """Messages as (role, content)."""
    return generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


def read(pb: generation_pb2.GenerateRequest, positions: int = POSITIONS) -> None:
    """As the servicer does."""
    check_lengths(pb, positions, BYTES_PER_TOKEN)
    incoming_from_pb(pb)


LARGE: list[tuple[dict[str, Any], str]] = [
    ({"text": "x" * LARGEST}, "text"),
    ({"text": "x" * (POSITIONS * BYTES_PER_TOKEN + 1)}, "text"),
    ({"text": "é" * (POSITIONS * BYTES_PER_TOKEN // 2 + 1)}, "text"),
    ({"token_ids": [1] * (POSITIONS + 1)}, "token_ids.ids"),
    ({"token_ids": [1] * LARGEST}, "token_ids.ids"),
    ({"resume_token_ids": [1] * LARGEST}, "resume_token_ids"),
    ({"speculation": {"prediction": {"text": "x" * LARGEST}}}, "speculation.prediction.text"),
    (
        {"speculation": {"prediction": {"token_ids": {"ids": [1] * LARGEST}}}},
        "speculation.prediction.token_ids.ids",
    ),
    ({"chat": conversation(*[("u", "x")] * 700_000)}, "chat.messages"),
    ({"chat": conversation(*[("u", "")] * (POSITIONS + 1))}, "chat.messages"),
    ({"chat": conversation(("user", "hi"), ("u" * LARGEST, ""))}, "chat.messages[1].role"),
    ({"chat": conversation(("u" * (MAX_ROLE + 1), ""))}, "chat.messages[0].role"),
    ({"chat": conversation(*[("user", "x" * (LARGEST // 1000))] * 1000)}, "chat.messages"),
    ({"chat": {"messages": [{"role": "u", "parts": [{}] * 700_000}]}}, "chat.messages[0].parts"),
    ({"chat": {"messages": [{"role": "u", "parts": [{}] * 700}] * 3}}, "chat.messages[2].parts"),
    ({"chat": {"messages": [{"role": "u", "tool_calls": [{}] * 700_000}]}}, "chat.messages[0].tool_calls"),
    ({"chat": {"messages": [{"role": "u", "name": "x" * (MAX_NAME + 1)}]}}, "chat.messages[0].name"),
    (
        {"chat": {"messages": [{"tool_calls": [{}, {"id": "x" * LARGEST}]}]}},
        "chat.messages[0].tool_calls[1].id",
    ),
    ({"chat": {"tools": [{"name": "f"}] * (MAX_TOOLS + 1)}}, "chat.tools"),
    ({"chat": {"tools": [{"name": "f" * LARGEST}]}}, "chat.tools[0].name"),
    ({"chat": {"tools": [{"description": "x" * LARGEST}]}}, "chat.messages"),
    ({"chat": {"tools": [{"parameters": "x" * LARGEST}]}}, "chat.messages"),
    ({"chat": {"messages": [{"tool_calls": [{"arguments": "x" * LARGEST}]}]}}, "chat.messages"),
    ({"chat": {"messages": [{"parts": [{"text": "x" * LARGEST}]}]}}, "chat.messages"),
    ({"chat": {"chat_template_kwargs": "x" * LARGEST}}, "chat.messages"),
    ({"model": "m" * LARGEST}, "model"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(700_000), 1.0)}}, "sampling.logit_bias"),
    ({"sampling": {"stop": ["x"] * 700_000}}, "sampling.stop"),
    ({"sampling": {"stop": ["x" * LARGEST]}}, "sampling.stop[0]"),
    ({"sampling": {"stop_token_ids": [1] * LARGEST}}, "sampling.stop_token_ids"),
]


@pytest.mark.parametrize(
    ("fields", "named"), LARGE, ids=[f"{named} {n}" for n, (_, named) in enumerate(LARGE)]
)
def test_what_cannot_fit_is_refused_by_its_length(fields: dict[str, Any], named: str) -> None:
    """Every text and list, one entry or a whole message too long: named at once."""
    pb = ask(**fields)
    started = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        read(pb)
    assert time.process_time() - started < SECONDS
    assert caught.value.field == named
    assert len(str(caught.value)) < 200


def test_what_just_fits_is_read() -> None:
    """The context's length of tokens, of the longest tokens, and of messages."""
    read(ask(token_ids=[1] * POSITIONS, resume_token_ids=[1] * POSITIONS))
    read(ask(text="x" * POSITIONS * BYTES_PER_TOKEN))
    read(ask(chat=conversation(*[("u" * MAX_ROLE, "x")] * POSITIONS)))


def test_a_large_context_does_not_let_any_number_of_messages_in() -> None:
    """Each costs a run of the template's loop."""
    read(ask(chat=conversation(*[("u", "x")] * MAX_MESSAGES)), positions=1 << 20)
    with pytest.raises(InvalidRequest):
        read(ask(chat=conversation(*[("u", "x")] * (MAX_MESSAGES + 1))), positions=1 << 20)


def test_a_prompt_that_is_too_long_says_so() -> None:
    """With the reason that clients know from prompts whose tokens were counted."""
    for fields in ({"text": "x" * LARGEST}, {"token_ids": [1] * LARGEST}):
        with pytest.raises(ContextTooLong):
            read(ask(**fields))
