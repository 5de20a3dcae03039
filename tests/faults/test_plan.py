"""The planner: the same seed, the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

import pytest

from tests.faults.harness.plan import (
    PROCESSES,
    RESTARTS,
    Ask,
    Fault,
    Kind,
    Manner,
    Mix,
    Planner,
    draw_cases,
)

MANY = 2000


def planner(seed: int, mix: Mix | None = None) -> Planner:
    """Over ten short cases."""
    cases = draw_cases(seed, 10, [[1, 2], [3, 4, 5]])
    return Planner(seed, mix or Mix(), cases, tokens=32, attacks=["flood", "silent"])


def drawn(seed: int, mix: Mix | None = None) -> tuple[Sequence[Ask], Sequence[Fault]]:
    """The beginning of a plan."""
    plan = planner(seed, mix)
    return list(islice(plan.asks(), MANY)), list(islice(plan.faults(), MANY))


def test_a_seed_is_a_plan() -> None:
    """Drawn twice it is the same, requests and faults; another seed is another plan."""
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert draw_cases(7, 10, [[1], [2]]) == draw_cases(7, 10, [[1], [2]])


def test_everything_happens() -> None:
    """Every manner that has a weight and every kind of fault comes up, to every process."""
    asks, faults = drawn(1)
    assert {ask.manner for ask in asks} == set(Mix().manners)
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.target for fault in faults if fault.kind is Kind.KILL} == set(PROCESSES)


def test_two_faults_in_a_row_have_two_targets() -> None:
    """So that two at a time never wait for each other."""
    _, faults = drawn(2)
    assert all(one.target != other.target for one, other in pairwise(faults))


@pytest.mark.parametrize("spared", [("verify-a",), ("verify-a", "draft-a", "orchestrator-a")])
def test_the_spared_are_never_restarted(spared: Sequence[str]) -> None:
    """They are stopped, cut off and delayed like everybody else."""
    _, faults = drawn(3, Mix(spared=spared))
    assert not [fault for fault in faults if fault.kind in RESTARTS and fault.target in spared]
    assert {fault.target for fault in faults if fault.kind is Kind.STOP} == set(PROCESSES)


def test_turns_are_taken_by_greedy_cases() -> None:
    """The noise of a second turn is its own, so only greedy tokens are known beforehand."""
    plan = planner(4)
    turns = [ask for ask in islice(plan.asks(), MANY) if ask.manner is Manner.TURNS]
    assert turns
    assert not any(plan.cases[ask.case].sampling for ask in turns)
