"""The drift benchmark counts what it says."""

from __future__ import annotations

from random import Random

from benchmarks import drift


def test_delays_count_from_the_fall() -> None:
    """A fall to nothing is seen within the steps that its size allows; no fall is missed in time."""
    found = drift.delays(0.9, lambda step: 0.0, runs=3, random=Random(1))
    assert max(found) < 60
    assert drift.delays(0.5, lambda step: 0.5, runs=1, random=Random(1)) == [float("inf")]


def test_false_alarms_are_per_ten_thousand_steps() -> None:
    """A steady stream raises none."""
    assert drift.false_alarms(0.7, runs=1, random=Random(1)) == 0.0
