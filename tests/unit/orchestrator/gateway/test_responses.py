"""From events to OpenAI's objects: what the other tests do not see."""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.gateway.requests import chat_from, completions_from
from orchestrator.gateway.responses import Answer
from outrider.client import Chunk, Complete, Started, TokenLogprob, Usage

ASKED = completions_from({"prompt": "x", "logprobs": 1})
SNOWMAN = "\N{SNOWMAN}".encode()


def _logprob(token: int, spelling: bytes | None, logprob: float = -0.5) -> TokenLogprob:
    other = TokenLogprob(token=9, logprob=-math.inf, spelling=b"other")
    return TokenLogprob(token=token, logprob=logprob, spelling=spelling, top=(other,))


def _complete() -> Complete:
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    return Complete(
        index=0,
        finish_reason="stop",
        stop="END",
        usage=usage,
        speculation={},
        seed=1,
        model="m",
        request_id="r",
    )


def test_what_became_of_a_prediction_is_told() -> None:
    """Over all choices, as details of the completion's tokens."""
    usage = Usage(completion_tokens=9, accepted_prediction_tokens=6, rejected_prediction_tokens=2)
    answer = Answer.to(replace(ASKED, include_usage=True), "id", 1)
    answer.usage = {0: usage, 1: usage}
    told = answer.usage_part()["usage"]["completion_tokens_details"]
    assert told == {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 4}


def test_log_probabilities_of_a_completion() -> None:
    """Texts, numbers that JSON has, the token among its alternatives, and where each token begins."""
    answer = Answer.to(ASKED, "id", 1)
    for text, spelling, offset in (("ab", b"ab", 0), ("c", b"c", 2)):
        chunk = Chunk(index=0, text=text, token_ids=(1,), logprobs=(_logprob(1, spelling),))
        part = answer.part(chunk, chunk)
        assert part is not None
        assert part["choices"][0]["logprobs"] == {
            "tokens": [text],
            "token_logprobs": [-0.5],
            "top_logprobs": [{"other": -9999.0, text: -0.5}],
            "text_offset": [offset],
        }


def test_a_token_that_is_part_of_a_character() -> None:
    """Its bytes are whole though its text is not; without a tokenizer there is its id."""
    asked = chat_from(
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": True, "top_logprobs": 1}
    )
    entries = (_logprob(1, SNOWMAN[:1]), _logprob(2, None))
    chunk = Chunk(index=0, text="", token_ids=(1, 2), logprobs=entries)
    part = Answer.to(asked, "id", 1).part(chunk, chunk)
    assert part is not None
    first, second = part["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("\N{REPLACEMENT CHARACTER}", [0xE2])
    assert (second["token"], second["bytes"]) == ("token_id:2", None)
    assert [other["token"] for other in first["top_logprobs"]] == ["other"]


def test_what_ended_a_text() -> None:
    """The stop text that was found, as vLLM tells it."""
    answer = Answer.to(ASKED, "id", 1)
    end = answer.part(_complete(), _complete())
    assert end is not None
    choice = end["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", "END", "")


def test_an_event_without_text_is_not_sent() -> None:
    """A verdict whose text is held back, as for a stop text that may begin, says nothing yet."""
    answer = Answer.to(ASKED, "id", 1)
    started = Started(index=0, request_id="r", seed=1, model="m", prompt_tokens=3, cached_tokens=0)
    held = Chunk(index=0, text="", token_ids=(1,))
    assert answer.part(started, started) is None
    assert answer.part(held, held) is None
    assert answer.model == "m"
