"""T(n): interpolated, monotone, and following the machine."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_service.speculation.cost_model import CostModel, measuring_points


def test_interpolates_between_points_and_is_flat_outside() -> None:
    """Between two points time grows in proportion; outside it is that of the nearest point."""
    cost = CostModel([2, 4, 8], [1.0, 2.0, 6.0], 16)
    assert [cost.seconds(n) for n in (1, 2, 3, 4, 6, 8, 16, 99)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 6.0, 6.0]


@given(
    st.lists(st.floats(1e-4, 10.0), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(1, 32), st.floats(1e-4, 10.0)), max_size=30),
)
def test_never_falls(seconds: list[float], observations: list[tuple[int, float]]) -> None:
    """Whatever was measured and observed, more tokens never take less time."""
    cost = CostModel([1, 2, 4, 8, 16], seconds, 32)
    for tokens, observed in observations:
        cost.observe(tokens, observed)
    times = [cost.seconds(n) for n in range(33)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))
    assert min(times) > 0.0


def test_follows_a_machine_that_slows_down() -> None:
    """Steady observations move the estimate there, and those of other sizes in the same direction."""
    cost = CostModel([1, 8, 64], [1.0, 1.5, 4.0], 64)
    for _ in range(30):
        cost.observe(8, 1.5)
    for _ in range(100):
        cost.observe(8, 3.0)
    assert cost.seconds(8) == pytest.approx(3.0, rel=0.01)
    assert 4.5 < cost.seconds(64) < 7.0


def test_a_size_measured_too_slow_is_tried_again() -> None:
    """While nodes are left out, the next larger size sinks towards the one that runs, and one step of its own
    lifts it again."""
    cost = CostModel([1, 4, 8], [1.0, 3.0, 4.0], 8)
    for _ in range(500):
        cost.observe(1, 1.0, nodes_left=True)
    sunk = cost.seconds(4)
    cost.observe(4, 3.0)
    assert sunk < 1.5
    assert cost.seconds(8) == pytest.approx(4.0, rel=0.1)
    assert cost.seconds(4) > sunk


def test_no_other_size_is_tried_where_no_node_was_left_out() -> None:
    """Steps without candidates say nothing about larger sizes."""
    cost = CostModel([1, 4, 8], [1.0, 3.0, 4.0], 8)
    for _ in range(500):
        cost.observe(1, 1.0)
    assert cost.seconds(4) == pytest.approx(3.0)


def test_one_pause_hardly_counts() -> None:
    """A step a hundred times slower than usual changes a known estimate by less than a sixth."""
    cost = CostModel([1, 8], [1.0, 2.0], 8)
    for _ in range(10):
        cost.observe(8, 2.0)
    cost.observe(8, 200.0)
    assert cost.seconds(8) <= 2.3 + 1e-9


def test_the_first_steps_correct_the_measurement_at_the_start() -> None:
    """It was made without sessions: after a few steps their mean is what counts, and all estimates rise."""
    cost = CostModel([1, 8], [1.0, 2.0], 8)
    for _ in range(8):
        cost.observe(8, 2.4)
    assert cost.seconds(8) == pytest.approx(2.4, rel=0.03)
    assert cost.seconds(1) > 1.05


def test_measuring_points_cover_the_range() -> None:
    """Points are powers of two and halfway points, and always one token and the most."""
    assert measuring_points(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert measuring_points(1) == [1]


def test_both_sides_of_an_edge_are_measured() -> None:
    """Behind it a forward takes longer; edges beyond the most tokens are left out."""
    assert measuring_points(20, edges=(14, 28)) == [1, 2, 3, 4, 6, 8, 12, 14, 15, 16, 20]
