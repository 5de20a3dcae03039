"""What the comparison refuses to measure or to believe."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.arms.base import OWN
from benchmarks.compare import measure, silent, verdict, warm_up
from benchmarks.samples import SampledRequest
from benchmarks.workload import Cell, Tokens, Turn, Workload
from scripts.child import ChildError

WORK = Workload(prompts=((1, 2), (3, 4)), tokens=4)
ONE, TWO = Cell(0.0, 1, 0.0), Cell(0.0, 2, 0.0)


class FakeArm:
    """Answers at once; `nodes` a step are drafted and `passes` target passes made per request."""

    kind, devices, engine, speculates = OWN, 2, "none", True

    def __init__(self, name: str, calls: list[str], nodes: float = 1.0, passes: int = 1) -> None:
        self.name = name
        self._calls, self._nodes, self._passes = calls, nodes, passes

    def runs(self, cell: Cell) -> bool:
        """Everything."""
        return True

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """As many tokens as asked for."""
        self._calls.append(f"{self.name} {len(prompts)}x{tokens}")
        arrivals = ((0.1, 1), (0.2, tokens - 1))
        return [
            SampledRequest(tuple(range(tokens)), arrivals, self._passes, {"drafted": self._nodes})
            for _ in prompts
        ]


def test_a_dead_draft_ends_the_run_before_it_begins() -> None:
    """Nothing was drafted in the first cell."""
    with pytest.raises(ChildError, match="proposed nothing to auto"):
        warm_up([FakeArm("auto", [], nodes=0.0)], WORK, [ONE])


def test_arms_take_turns_in_turning_order() -> None:
    """After the warm-up every turn runs on all arms, and begins with another one."""
    calls: list[str] = []
    arms = [FakeArm("a", calls), FakeArm("b", calls)]
    measure(arms, WORK, [Turn(ONE, 0, (0,)), Turn(ONE, 1, (1,))])
    assert [call.split()[0] for call in calls[2:]] == ["a", "b", "b", "a"]


def test_own_arms_warm_up_with_whole_requests_once_per_concurrency() -> None:
    """A second temperature needs a short request only."""
    calls: list[str] = []
    warm_up([FakeArm("a", calls)], WORK, [ONE, Cell(0.0, 1, 1.0), TWO])
    assert calls == ["a 1x4", "a 1x8", "a 2x4"]


def test_a_speculating_arm_that_accepts_nothing_fails_the_run() -> None:
    """Its figures would be those of another mode."""
    accepting, silent_one = FakeArm("auto", [], passes=1), FakeArm("sequential", [], passes=3)
    batches = measure([accepting, silent_one], WORK, [Turn(ONE, 0, (0,))])
    assert silent([accepting, silent_one], batches) == ["sequential"]
    assert verdict(["sequential"], []) == 1
    assert verdict([], ["a difference"]) == 1
    assert verdict([], []) == 0
