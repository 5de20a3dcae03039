"""Tokens per second of a session."""

from __future__ import annotations

import pytest

from draft_service.pace import Pace


def test_nothing_is_known_before_the_first_verdict():
    """Nor after one that does not say how long its forward took."""
    pace = Pace()
    assert pace.rate is None
    pace.observe(2, 0.0, now=0.0)
    assert pace.rate is None


def test_the_targets_forward_stands_for_the_first_round():
    """One verdict is enough for an estimate."""
    pace = Pace()
    pace.observe(2, 0.010, now=5.0)
    assert pace.rate == pytest.approx(200)


def test_the_pace_follows_the_verdicts():
    """Three tokens every 20 ms are 150 tokens per second, whatever the first estimate was."""
    pace = Pace()
    for round_ in range(60):
        pace.observe(3, 0.5, now=round_ * 0.020)
    assert pace.rate == pytest.approx(150, rel=0.01)
