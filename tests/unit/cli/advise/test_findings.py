"""What follows from the figures."""

from __future__ import annotations

import pytest

from outrider.cli.advise.options import WITHOUT
from tests.unit.cli.advise.findings import candidate, findings


def test_the_draft_with_the_largest_mean_speed_up_is_taken() -> None:
    """Over all loads, though another is better for one."""
    steady, peaked = candidate("steady", (100, 300, 400)), candidate("peaked", (120, 200, 400))
    found = findings(peaked, steady)
    assert found.speed_ups(steady) == [2.0, 1.5, 1.0]
    assert found.mean_speed_up(steady) == pytest.approx(3 ** (1 / 3))
    assert found.best is steady
    assert found.advice.draft == "steady"


def test_a_draft_that_brings_next_to_nothing_is_not_taken() -> None:
    """It would be one more process for two per cent."""
    found = findings(candidate("weak", (51, 204, 408)))
    assert found.best is None
    assert found.advice == WITHOUT


@pytest.mark.parametrize(
    ("drafting", "rests"),
    [((1.0, 1.0, 1.0), None), ((1.0, 0.9, 0.1), 32), ((1.0, 0.2, 0.1), 8), ((1.0, 0.2, 0.9), None)],
)
def test_drafts_rest_from_where_they_are_seldom_wanted_for_good(drafting, rests) -> None:
    """A load in between that goes without does not count."""
    assert candidate("some", (1, 1, 1), drafting).rests_from == rests


def test_acceptance_is_told_by_task() -> None:
    """Of its texts alone."""
    one = candidate("some", (1, 1, 1))
    assert one.acceptance(("chat", "code"), "chat")[0] == 0.75
    assert one.acceptance(("chat", "code"), "code")[1] == pytest.approx(2 / 3)
    assert one.acceptance(("chat", "code"))[0] == 0.75
