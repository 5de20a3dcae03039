"""T(n) at start: what the first steps of a size cost is not part of it, and a slow machine does not hold up
the start."""

from __future__ import annotations

import pytest

from tests.unit.verify_service.fakes import Clock, FakeRunner
from verify_service.speculation.measure import MAX_MEASUREMENT, measure_costs

LARGEST = 512


class Machine:
    """A runner on a machine where each token takes some seconds. It takes twice as many the first time that a
    step needs so much memory, and a tenth more the first time that a size comes, which is recorded."""

    def __init__(self, seconds: float) -> None:
        self.clock = Clock()
        self.runner = FakeRunner(num_pages=LARGEST // 4 + 1, on_forward=self._compute)
        self._seconds, self._sizes = seconds, {0}

    def _compute(self, tokens: int) -> None:
        new = 2.0 if tokens > max(self._sizes) else 1.0 if tokens in self._sizes else 1.1
        self.clock.now += self._seconds * tokens * new
        self._sizes.add(tokens)


def test_the_first_step_of_a_size_is_not_part_of_the_measured_times() -> None:
    """Steps of all sizes are as fast as later ones are, for which memory and recordings are there."""
    machine = Machine(0.0001)
    cost = measure_costs(machine.runner, LARGEST, (96, 256), machine.clock)
    for tokens in (1, 64, 65, 97, 128, 257, LARGEST):
        assert cost.seconds(tokens) == pytest.approx(0.0001 * tokens)


@pytest.mark.parametrize("seconds", [0.002, 0.02, 0.2])
def test_the_start_is_not_held_up_by_a_slow_machine(seconds: float) -> None:
    """One round of small steps, and later a step that has begun, are the most that the limits do not end;
    steps that were not measured are extrapolated."""
    machine = Machine(seconds)
    begun = machine.clock.now
    cost = measure_costs(machine.runner, LARGEST, (), machine.clock)
    assert machine.clock.now - begun < 2 * MAX_MEASUREMENT + seconds * 2 * 64 * 8
    assert cost.seconds(LARGEST) >= seconds * LARGEST * 0.99
