"""How many drafts run, and which, with a clock of our own."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.autoscaler import Autoscaler, DraftPool
from outrider.cli.up_plan import ChildSpec


def _run(scaler: Autoscaler, values: list[float], running: int = 1, now: float = 0.0) -> list[int]:
    """What runs after each second, when this is needed."""
    history = []
    for value in values:
        running = scaler.decide(running, value, now)
        history.append(running)
        now += 1.0
    return history


def test_up_at_once() -> None:
    """Whatever is missing, all of it."""
    assert _run(Autoscaler(1, 8, 10.0), [0.4, 3.2]) == [1, 4]


def test_down_slowly_and_one_by_one() -> None:
    """Not before fewer have sufficed for the whole window, and then not all at once."""
    history = _run(Autoscaler(1, 8, 10.0), [3.5] + [0.5] * 30)
    assert history[:11] == [4] * 11
    assert history[-1] == 1
    assert all(before - after <= 1 for before, after in pairwise(history))


def test_a_peak_within_the_window_keeps_its_replicas() -> None:
    """Load that comes and goes ends nobody."""
    values = ([3.5] + [0.5] * 8) * 5
    assert set(_run(Autoscaler(1, 8, 10.0), values)) == {4}


def test_what_runs_at_the_beginning_is_kept_for_a_window() -> None:
    """A process that has just begun to look knows nothing of what was needed before."""
    assert _run(Autoscaler(1, 8, 10.0), [1.0] * 8, running=3) == [3] * 8


def test_a_tenth_is_no_difference() -> None:
    """As in Kubernetes: 4.3 of 4 are 4, and 4.5 are 5."""
    assert Autoscaler(1, 8, 10.0).decide(4, 4.3, 0.0) == 4
    assert Autoscaler(1, 8, 10.0).decide(4, 4.5, 0.0) == 5


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_nonsense_changes_nothing(value: float) -> None:
    """It came from elsewhere."""
    assert Autoscaler(1, 8, 10.0).decide(3, value, 0.0) == 3


@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(allow_nan=True)), max_size=60),
)
def test_within_bounds_whatever_is_needed(least: int, more: int, history: list[tuple[float, float]]) -> None:
    """From the first decision on; the window holds each number at most once."""
    scaler, running, now = Autoscaler(least, least + more, 30.0), 0, 0.0
    for elapsed, value in history:
        now += elapsed
        running = scaler.decide(running, value, now)
        assert least <= running <= least + more
        numbers = [number for _, number in scaler._needed]
        assert numbers == sorted(set(numbers), reverse=True)


def _pool() -> DraftPool:
    return DraftPool([ChildSpec(f"draft-{i}", "draft", ()) for i in range(4)], ["draft-0"])


def test_the_newest_leave_first() -> None:
    """Who has been there longest has the most to lose."""
    pool = _pool()
    assert [spec.name for spec in pool.grow(3)] == ["draft-1", "draft-2"]
    assert pool.shrink(1) == ["draft-1", "draft-2"]
    assert pool.running == ["draft-0"]


def test_a_name_is_taken_until_its_draft_has_ended() -> None:
    """Two processes of one name would be one in logs and metrics."""
    pool = _pool()
    pool.grow(3)
    pool.shrink(2)
    assert [spec.name for spec in pool.grow(4)] == ["draft-3"]
    pool.leaving.discard("draft-2")
    assert [spec.name for spec in pool.grow(4)] == ["draft-2"]


def test_nothing_to_do() -> None:
    """The right number is left alone."""
    pool = _pool()
    assert (pool.grow(1), pool.shrink(1)) == ([], [])
