"""The figures of the tracing benchmark."""

from __future__ import annotations

import pytest

from benchmarks.samples import SampledRequest
from benchmarks.tracing import ALWAYS, OFF, SAMPLER, TracedTurn, figures, measure_parts, traceparent_of
from outrider.telemetry.spans import is_sampled

SAMPLE = SampledRequest((1,) * 11, ((0.1, 1), (0.3, 10)), passes=4)
"""Ten tokens in four rounds of 50 ms."""


def turn(arm: str, index: int, spans: int, cpu: float, seconds: float = 0.2) -> TracedTurn:
    """One request, whose decoding took some seconds."""
    sample = SampledRequest(SAMPLE.tokens, ((0.1, 1), (0.1 + seconds, 10)), SAMPLE.passes)
    return TracedTurn(arm, index, (sample,), spans, {"verify": cpu / 2, "draft": cpu / 2})


def test_figures_are_per_round_and_against_the_same_turn() -> None:
    """Turn by turn: the second pair of turns was slow for both."""
    off = {0: turn(OFF, 0, 0, 0.08), 1: turn(OFF, 1, 0, 0.8, 2.0)}
    always = {0: turn(ALWAYS, 0, 12, 0.0804, 0.25), 1: turn(ALWAYS, 1, 12, 0.8004, 2.5)}
    found = figures(always, off)
    assert found["spans"].middle == 3
    assert found["against_off"].middle == pytest.approx(0.8)
    assert found["more_cpu_us"].middle == pytest.approx(100)
    assert figures(off, off)["round_ms"].low == pytest.approx(162.5)


def test_a_request_says_whether_it_is_traced() -> None:
    """By its traceparent, or by none."""
    assert is_sampled(traceparent_of(ALWAYS))
    assert not is_sampled(traceparent_of(OFF))
    assert traceparent_of(SAMPLER) == ""


def test_the_parts_cost_something() -> None:
    """Microseconds, not nothing and not milliseconds."""
    parts = measure_parts()
    assert all(0.5 < parts[name] < 500 for name in ("record", "export"))
