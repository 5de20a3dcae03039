"""The scaler, an autoscaler that follows it, and a modelled pool whose true capacity neither is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from orchestrator.observing.draft_load import Totals
from orchestrator.observing.scaler import Observation, Scaler
from tests.unit.orchestrator.observing.kubernetes_autoscaler import Autoscaler

ROUND = 2.0
"""Seconds between looks."""
START = 10.0
"""Seconds that a replica takes to start."""
STEP = 0.02
"""Seconds of a target step."""


@dataclass
class World:
    """Replicas of 64 slots that serve `capacity` sessions well: beyond it drafts are late in proportion, and
    the target idles."""

    capacity: float
    scaler: Scaler = field(default_factory=lambda: Scaler(0, ROUND))
    autoscaler: Autoscaler = field(default_factory=lambda: Autoscaler(1, 20, 60.0))
    now: float = 0.0
    wanted: int = 1
    ready: list[float] = field(default_factory=lambda: [0.0])
    """When each replica can be used."""
    totals: Totals = field(default_factory=Totals)
    history: list[int] = field(default_factory=list)
    """Replicas after each look."""

    def run(self, sessions: int, seconds: float) -> World:
        """Let so many sessions want drafts for a while."""
        end = self.now + seconds
        while self.now < end:
            self.now += ROUND
            usable = sum(ready <= self.now for ready in self.ready)
            self._serve(sessions, usable)
            seen = Observation(
                wanted=sessions, others=0, replicas=usable, slots=64 * usable, totals=self.totals
            )
            value = self.scaler.observe(seen, self.now).all_replicas
            count = self.autoscaler.decide(len(self.ready), value, self.now)
            new = [self.now + START] * (count - len(self.ready))
            self.ready = [*self.ready, *new][:count]
            self.history.append(count)
        return self

    def _serve(self, sessions: int, usable: int) -> None:
        overload = sessions / usable / self.capacity
        rounds = sessions * ROUND / STEP
        self.totals += Totals(
            wanted_seconds=sessions * ROUND,
            idle_seconds=sessions * ROUND * (0.4 if overload > 1.0 else 0.05),
            lag_seconds=rounds * STEP * (1.5 * overload if overload > 1.0 else 0.5),
            lags=round(rounds),
            step_seconds=rounds * STEP,
            steps=round(rounds),
        )


@pytest.mark.parametrize(("capacity", "sessions"), [(3.0, 9), (1.5, 6), (10.0, 40), (1.0, 8)])
def test_the_pool_finds_what_the_load_needs(capacity: float, sessions: int) -> None:
    """Within two minutes it is enough, and never more than twice that; later one fewer is tried, rarely."""
    world = World(capacity).run(1, 60).run(sessions, 120)
    needed = -(-sessions // capacity)
    assert needed <= world.history[-1]
    world.run(sessions, 600)
    assert needed - 1 <= min(world.history[-300:])
    assert sum(count < needed for count in world.history[-300:]) < 30
    assert max(world.history) <= 2 * needed


def test_steady_load_does_not_make_it_swing() -> None:
    """In an hour and a half what was learned fades, so that fewer replicas are tried now and then; rarely."""
    world = World(3.0).run(9, 5400)
    downs = sum(after < before for before, after in pairwise(world.history))
    short = sum(count < 3 for count in world.history[60:])
    assert downs <= 6
    assert short * ROUND < 0.05 * 5400


def test_it_follows_the_load_down() -> None:
    """A minute after the load has gone replicas go, one after the other, to the least."""
    world = World(3.0).run(9, 300)
    most = world.history[-1]
    world.run(1, 50)
    assert world.history[-1] == most
    world.run(1, 120)
    assert world.history[-1] == 1


def test_no_load_needs_the_least() -> None:
    """Whatever came before."""
    assert World(3.0).run(9, 300).run(0, 300).history[-1] == 1
