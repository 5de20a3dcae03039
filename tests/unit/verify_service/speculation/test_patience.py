"""What is known of a draft's answers."""

from __future__ import annotations

import pytest

from verify_service.speculation.patience import Patience


def learned(turnaround: float = 0.01) -> Patience:
    """A session whose draft answers in `turnaround` with a complete tree."""
    patience = Patience(max_seconds=0.05)
    for _ in range(60):
        patience.answered(turnaround)
        patience.completed((0.9, 0.8, 0.7))
    return patience


def test_expects_nothing_that_never_came() -> None:
    """Before the first block has come none is due."""
    assert Patience(max_seconds=0.05).due(0.0) is None


def test_a_block_is_due_after_the_usual_time() -> None:
    """Counted from the verdict that it answers."""
    assert learned().due(waited=0.004) == pytest.approx(0.006, rel=0.01)


def test_an_irregular_draft_may_come_later_than_usual() -> None:
    """A block that is late is due in about one mean deviation, until it is later than three of them."""
    patience = Patience(max_seconds=1.0)
    for seconds in (0.008, 0.012) * 40:
        patience.answered(seconds)
    assert patience.due(waited=0.011) == pytest.approx(patience.deviation)
    assert patience.due(waited=0.017) is None


def test_a_wait_has_a_limit() -> None:
    """However slow the draft, the setting bounds the wait."""
    patience = learned(turnaround=1.0)
    assert patience.due(waited=0.02) is not None
    assert patience.due(waited=0.05) is None


def test_a_draft_that_went_silent_is_not_expected_until_it_answers() -> None:
    """One step without the block that was due ends the expectation, one useful block restores it."""
    patience = learned()
    patience.ran_out()
    assert patience.due(waited=0.0) is None
    patience.answered(0.01)
    assert patience.due(waited=0.0) is not None


def test_gain_is_what_a_complete_tree_brings_beyond_the_nodes_at_hand() -> None:
    """Each node less its price; nodes below the price count for nothing."""
    assert learned().gain([], price=0.0) == pytest.approx(2.4)
    assert learned().gain([0.9], price=0.0) == pytest.approx(1.5)
    assert learned().gain([], price=0.75) == pytest.approx(0.15 + 0.05)
    assert learned().gain([0.9, 0.8, 0.7, 0.6], price=0.0) == 0.0


def test_shorter_trees_lower_the_expected_probabilities() -> None:
    """A tree that lacks a node counts as one whose node is worth nothing."""
    patience = learned()
    for _ in range(60):
        patience.completed([0.5])
    assert patience.ready_probabilities == pytest.approx([0.5, 0.0, 0.0], abs=1e-3)


def test_a_new_session_starts_with_what_another_learned() -> None:
    """Its own lessons do not reach back, and a wait in vain is not inherited."""
    first = learned()
    first.ran_out()
    second = first.successor()
    assert second.due(0.0) == pytest.approx(0.01, rel=0.01)
    second.answered(0.05)
    second.completed([0.1])
    assert first.turnaround == pytest.approx(0.01)
    assert first.ready_probabilities[0] == pytest.approx(0.9)


def test_a_sequential_session_waits_half_as_long_after_each_wait_in_vain() -> None:
    """A silent draft costs it a few seconds at most."""
    patience = Patience(0.05)
    first = patience.sequential_wait()
    patience.ran_out()
    assert patience.sequential_wait() == first / 2
    patience.answered(0.01)
    assert patience.sequential_wait() == first
