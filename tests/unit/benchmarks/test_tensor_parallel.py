"""Where the time of a step in several ranks goes."""

from __future__ import annotations

import pytest

from benchmarks.tensor_parallel import Step, parts_of, report

STEP = Step(10.0, 11.0)
TIMES = [
    [9.5, 9.9, 10.2, 10.5, 10.7, 10.8],
    [9.6, 9.9, 10.4, 10.5, 10.6, 10.8],
]
"""Of two ranks: an exchange before the step, one at which rank 0 waits, one at which it comes last."""


def test_the_parts_are_told_apart() -> None:
    """Waiting ends when the last rank comes; communication begins there; the rest is computing."""
    parts = parts_of(STEP, TIMES)
    assert parts.waiting == pytest.approx(0.2)
    assert parts.communication == pytest.approx(0.1 + 0.1)
    assert parts.computing == pytest.approx(0.6)


def test_the_report_compares_both_arms() -> None:
    """Tokens per second count all sequences of a step; the parts are the ranks' alone."""
    lines = report({2: [[Step(0.0, 2.0)], [STEP]]}, TIMES, 2)
    assert lines[1].split() == ["2", "1", "2000.00", "1.0", "1.00"]
    assert lines[2].split() == ["2", "2", "1000.00", "2.0", "2.00", "600.00", "200.00", "200.00"]
