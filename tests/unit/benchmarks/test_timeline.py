"""Figures of a pipeline from its timeline."""

from __future__ import annotations

import pytest

from benchmarks.timeline import intersect, joined, pipeline_figures
from outrider.v1 import generation_pb2

DRAFT, VERIFY = generation_pb2.TimelineEvent.LANE_DRAFT, generation_pb2.TimelineEvent.LANE_VERIFY


def event(
    lane: generation_pb2.TimelineEvent.Lane, start_us: int, micros: int
) -> generation_pb2.TimelineEvent:
    """A bar."""
    return generation_pb2.TimelineEvent(lane=lane, start_unix_nano=start_us * 1000, duration_micros=micros)


def test_a_pipeline_is_judged_after_the_prefill() -> None:
    """Two steps of 40 in 100 microseconds, of which the draft worked during 20; the prefill is left out."""
    complete = generation_pb2.Complete(
        timeline=[
            *(event(VERIFY, 0, 50), event(VERIFY, 60, 40), event(VERIFY, 110, 40)),
            *(event(DRAFT, 10, 10), event(DRAFT, 95, 20)),
        ],
        speculation=generation_pb2.SpeculationStats(idle_micros=20),
    )
    figures = pipeline_figures(complete)
    assert figures["efficiency"] == pytest.approx(0.8)
    assert figures["idle"] == pytest.approx(0.2)
    assert figures["overlap"] == pytest.approx(10 / 80)


def test_a_request_without_steps_has_no_figures() -> None:
    """A single token is all prefill."""
    assert pipeline_figures(generation_pb2.Complete(timeline=[event(VERIFY, 0, 50)])) == {}


def test_intervals_are_joined_and_cut() -> None:
    """What touches or overlaps is one; what both have is kept."""
    assert joined([(0, 2), (2, 3), (1, 2), (5, 6)]) == [(0, 3), (5, 6)]
    assert intersect([(0, 3), (5, 6)], [(2, 6)]) == [(2, 3), (5, 6)]
