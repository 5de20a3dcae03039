"""Figures of a pipeline from its timeline."""

from __future__ import annotations

import pytest

from benchmarks.timeline import intersect, joined, pipeline_figures
from outrider.client import Complete, TimelineEvent, Usage


def complete(events: list[TimelineEvent], idle_micros: int = 0) -> Complete:
    """The end of a request with these bars."""
    return Complete(
        index=0,
        finish_reason="length",
        stop="",
        usage=Usage(),
        speculation={"idle_micros": idle_micros},
        seed=0,
        model="",
        request_id="",
        timeline=tuple(events),
    )


def event(lane: str, start_us: int, micros: int) -> TimelineEvent:
    """A bar."""
    return TimelineEvent(lane=lane, name="", start_ns=start_us * 1000, duration_us=micros)


def test_a_pipeline_is_judged_after_the_prefill() -> None:
    """Two steps of 40 in 100 microseconds, of which the draft worked during 20; the prefill is left out."""
    events = [
        *(event("verify", 0, 50), event("verify", 60, 40), event("verify", 110, 40)),
        *(event("draft", 10, 10), event("draft", 95, 20)),
    ]
    figures = pipeline_figures(complete(events, idle_micros=20))
    assert figures["efficiency"] == pytest.approx(0.8)
    assert figures["idle"] == pytest.approx(0.2)
    assert figures["overlap"] == pytest.approx(10 / 80)


def test_a_request_without_steps_has_no_figures() -> None:
    """A single token is all prefill."""
    assert pipeline_figures(complete([event("verify", 0, 50)])) == {}


def test_intervals_are_joined_and_cut() -> None:
    """What touches or overlaps is one; what both have is kept."""
    assert joined([(0, 2), (2, 3), (1, 2), (5, 6)]) == [(0, 3), (5, 6)]
    assert intersect([(0, 3), (5, 6)], [(2, 6)]) == [(2, 3), (5, 6)]
