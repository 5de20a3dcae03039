"""Times and speculation of one request, as vLLM's clients look for them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.gateway.outgoing.figures import metrics_of
from outrider.client import Complete, Usage
from tests.unit.client.fake_orchestrator import FakeOrchestrator
from tests.unit.orchestrator.gateway.http import Response, posted

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def end(tokens: int = 11, histogram: tuple[int, ...] = (), **counts: float) -> Complete:
    """A continuation that waited 10 ms, had its first token after 50 ms and ended after 250 ms."""
    micros = {"admission_micros": 10_000, "first_token_micros": 50_000, "total_micros": 250_000}
    return Complete(
        index=0,
        finish_reason="length",
        stop="",
        usage=Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=0),
        speculation={**micros, **counts},
        seed=1,
        model="m",
        request_id="r",
        accepted_histogram=histogram,
    )


def test_times_leave_the_queue_out() -> None:
    """But for the field that tells it."""
    found = metrics_of([end()])
    assert found is not None
    assert (found["queue_time_ms"], found["time_to_first_token_ms"]) == (10.0, 40.0)
    assert (found["generation_time_ms"], found["mean_itl_ms"]) == (200.0, 20.0)
    assert found["tokens_per_second"] == pytest.approx(11 / 0.24)
    single = metrics_of([end(tokens=1)])
    assert single is not None
    assert single["mean_itl_ms"] is None


def test_speculation_adds_up() -> None:
    """Steps and accepted tokens are those of the histogram."""
    found = metrics_of([end(histogram=(4, 1, 0, 3), verified=40)])
    assert found is not None
    assert found["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 10 / 8,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [4, 1, 0, 3],
        "num_spec_steps": 8,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 40,
        "num_spec_tokens": 3,
    }


def test_without_speculation() -> None:
    """Nothing was verified and nothing accepted."""
    found = metrics_of([end()])
    assert found is not None
    assert found["speculative_decoding"]["acceptance_histogram"] == [0]
    assert found["speculative_decoding"]["mean_acceptance_length"] == 1.0


def test_several_continuations_have_none() -> None:
    """Their times are not those of the request."""
    assert metrics_of([end(), end()]) is None


def answered(fake: FakeOrchestrator, figures: bool, **fields: Any) -> Response:
    """An answer of a gateway that tells figures, or does not."""

    return posted(fake.endpoint, "/v1/completions", {"prompt": "count", **fields}, figures=figures)


def test_answers_carry_them_where_they_are_wanted(fake: FakeOrchestrator) -> None:
    """Whole answers, and the last part of a stream; no other part, and no answer unless it is set."""
    assert answered(fake, True).json["metrics"]["speculative_decoding"]["num_spec_tokens"] == 1
    *parts, last, done = answered(fake, True, **STREAM).events
    assert last["metrics"]["queue_time_ms"] == 0.0
    assert done == "[DONE]"
    assert all("metrics" not in part for part in parts)
    assert "metrics" not in answered(fake, False).json
    assert answered(fake, True, n=2).json["metrics"] is None
