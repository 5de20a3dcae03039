"""Waiting for candidates: only while it pays."""

from __future__ import annotations

import pytest

from outrider.messages import VerifyPolicy
from verify_service.patience import Patience

PIPELINED, SEQUENTIAL, OFF = VerifyPolicy.PIPELINED, VerifyPolicy.SEQUENTIAL, VerifyPolicy.OFF


def learned(
    turnaround: float = 0.01, ready_tokens: float = 5.0, tokens: int = 4, seconds: float = 0.04
) -> Patience:
    """A session whose draft answers in `turnaround` and that makes tokens / seconds."""
    patience = Patience(max_seconds=0.05)
    for _ in range(30):
        patience.answered(turnaround)
        patience.completed(ready_tokens)
        patience.stepped(tokens, seconds)
    return patience


def test_waits_for_nothing_it_does_not_know() -> None:
    """Before the first block has come there is no wait."""
    patience = Patience(max_seconds=0.05)
    patience.stepped(1, 0.01)
    assert patience.wait(PIPELINED, expected_now=1.0) == 0.0


def test_waits_after_a_miss_when_the_draft_is_quick() -> None:
    """Four more tokens within 10 ms beat 100 tokens per second; the wait ends soon after a block is due."""
    wait = learned().wait(PIPELINED, expected_now=1.0)
    assert 0.01 <= wait <= 0.02


def test_starts_at_once_with_good_candidates_at_hand() -> None:
    """Waiting brings nothing when the tree is as good as a complete one."""
    assert learned().wait(PIPELINED, expected_now=5.0) == 0.0


def test_does_not_wait_when_the_gain_is_smaller_than_the_usual_rate() -> None:
    """Half a token in 10 ms is less than the 100 tokens per second it makes anyway."""
    assert learned().wait(PIPELINED, expected_now=4.5) == 0.0


def test_does_not_wait_for_a_slow_draft() -> None:
    """Four more tokens after 50 ms are less than what the session makes meanwhile."""
    assert learned(turnaround=0.05).wait(PIPELINED, expected_now=1.0) == 0.0


def test_never_longer_than_the_limit() -> None:
    """However much a wait would bring, it is bounded by the setting."""
    assert learned(turnaround=1.0, tokens=1, seconds=10.0).wait(PIPELINED, expected_now=1.0) == 0.05


def test_a_draft_that_went_silent_is_not_waited_for_long() -> None:
    """Each wait in vain makes the next less likely; after a few there is none."""
    patience = learned()
    waits = 0
    while patience.wait(PIPELINED, expected_now=1.0) > 0.0:
        patience.ran_out()
        waits += 1
    assert waits <= 3


def test_a_draft_that_comes_back_is_waited_for_again() -> None:
    """One useful block undoes the waits in vain."""
    patience = learned()
    for _ in range(10):
        patience.ran_out()
    patience.answered(0.01)
    assert patience.wait(PIPELINED, expected_now=1.0) > 0.0


def test_a_sequential_session_waits_generously() -> None:
    """Ten times the usual answer, within a quarter of a second and two; whatever is at hand."""
    assert Patience(0.05).wait(SEQUENTIAL, expected_now=9.0) == 2.0
    assert learned(turnaround=0.01).wait(SEQUENTIAL, expected_now=9.0) == 0.25
    assert learned(turnaround=0.1).wait(SEQUENTIAL, expected_now=9.0) == pytest.approx(1.0)
    assert learned(turnaround=5.0).wait(SEQUENTIAL, expected_now=9.0) == 2.0


def test_a_sequential_session_gives_up_on_a_dead_draft() -> None:
    """Its wait halves with every one in vain."""
    patience = Patience(0.05)
    waits = []
    for _ in range(40):
        waits.append(patience.wait(SEQUENTIAL, 1.0))
        patience.ran_out()
    assert sum(waits) <= 4.01


def test_no_speculation_no_wait() -> None:
    """Policy OFF never waits."""
    assert learned().wait(OFF, expected_now=1.0) == 0.0


def test_a_block_that_is_late_is_expected_a_little_longer() -> None:
    """First the usual time, then the usual deviation, then not any more."""
    patience = Patience(max_seconds=1.0)
    assert patience.remaining(0.0) is None
    patience.answered(0.1)
    assert patience.remaining(0.02) == pytest.approx(0.08)
    assert patience.remaining(0.2) == pytest.approx(0.05)
    assert patience.remaining(0.26) is None
