"""Figures of what was measured."""

from __future__ import annotations

import pytest

from benchmarks.samples import (
    Batch,
    SampledRequest,
    Spread,
    acceptance_length,
    gaps,
    paired_ratio,
    percentile,
)
from benchmarks.workload import Cell, Turn

TURN = Turn(Cell(0.0, 2, 0.0), 0, (0, 1))
STEADY = SampledRequest((1, 2, 3, 4, 5), ((0.5, 1), (1.0, 2), (1.5, 2)))
"""One token after half a second, then two every half second."""


def test_speed_counts_all_tokens_until_the_last_one_came() -> None:
    """Two requests of five tokens that end at 1.5 and 2 seconds make five tokens per second."""
    late = SampledRequest((1, 2, 3, 4, 5), ((1.0, 1), (2.0, 4)))
    figures = Batch("arm", TURN, (STEADY, late)).figures()
    assert figures["tokens_s"] == 5.0
    assert figures["ttft_ms"] == 750.0


def test_a_request_that_was_sent_later_waits_from_then_on() -> None:
    """Time to the first token counts from a request's own sending, the batch's speed from its begin."""
    later = SampledRequest(STEADY.tokens, STEADY.arrivals, sent=0.25)
    figures = Batch("arm", TURN, (later,)).figures()
    assert figures["ttft_ms"] == 250.0
    assert figures["tokens_s"] == pytest.approx(5 / 1.5)


def test_a_steady_load_is_measured_while_all_places_are_taken() -> None:
    """What comes after the last request was sent does not count; sent all at once there is no such time."""
    later = SampledRequest(STEADY.tokens, ((1.5, 1), (2.0, 2), (9.0, 2)), sent=1.0)
    assert Batch("arm", TURN, (STEADY, later)).figures()["steady_s"] == pytest.approx(3 / 1.0)
    assert "steady_s" not in Batch("arm", TURN, (STEADY, STEADY)).figures()


def test_decoding_leaves_the_first_delivery_out() -> None:
    """Four tokens in the second after the first one are four per second, and requests add up."""
    assert Batch("arm", TURN, (STEADY,)).figures()["decode_s"] == 4.0
    assert Batch("arm", TURN, (STEADY, STEADY)).figures()["decode_s"] == 8.0


def test_gaps_are_between_deliveries() -> None:
    """A delivery of two tokens ends one gap."""
    assert gaps(STEADY) == [0.5, 0.5]


def test_acceptance_length_is_tokens_per_pass() -> None:
    """Passes are the deliveries after the first, or what the arm says."""
    assert acceptance_length([STEADY]) == 2.0
    assert acceptance_length([SampledRequest(STEADY.tokens, STEADY.arrivals, passes=4)]) == 1.0


def test_extra_figures_are_means_over_requests() -> None:
    """A figure that one request lacks is left out."""
    one = SampledRequest((1, 2), ((0.1, 1), (0.2, 1)), extra={"idle": 0.1, "overlap": 1.0})
    two = SampledRequest((1, 2), ((0.1, 1), (0.2, 1)), extra={"idle": 0.3})
    figures = Batch("arm", TURN, (one, two)).figures()
    assert figures["idle"] == pytest.approx(0.2)
    assert "overlap" not in figures


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.99, 4), (0.25, 1), (0.0, 1)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    """The smallest value that at least the share of values does not exceed."""
    assert percentile([1, 2, 3, 4], share) == value


def test_a_spread_is_median_and_quartiles() -> None:
    """One value has no spread."""
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratios_are_taken_turn_by_turn() -> None:
    """A slow minute that hits both arms leaves the ratio alone; turns of one arm alone do not count."""
    ours, theirs = {0: 20.0, 1: 2.0, 2: 99.0}, {0: 10.0, 1: 1.0}
    assert paired_ratio(ours, theirs) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio(ours, {}) is None
