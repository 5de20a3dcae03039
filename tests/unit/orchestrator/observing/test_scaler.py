"""How many drafts are needed: the pure rule, with a clock of our own."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.observing.draft_load import Totals
from orchestrator.observing.scaler import (
    FADE_SECONDS,
    JUDGE_SECONDS,
    MEAN_SECONDS,
    MIN_FACTOR,
    UTILIZATION,
    Demand,
    Observation,
    Scaler,
)

SLOTS = 10
"""Of one replica."""


class Pool:
    """A scaler with a clock, and the sums that its orchestrator keeps."""

    def __init__(self, sessions_per_replica: int = 0, others: int = 0) -> None:
        self.scaler = Scaler(sessions_per_replica, period=1.0)
        self.others = others
        self.now = 1000.0
        self.totals = Totals()

    def look(self, wanted: int, replicas: int = 1) -> Demand:
        """One observation now."""
        seen = Observation(
            wanted=wanted, others=self.others, replicas=replicas, slots=SLOTS * replicas, totals=self.totals
        )
        return self.scaler.observe(seen, self.now)

    def run(self, wanted: int, seconds: float, replicas: int = 1, **rates: Any) -> Demand:
        """Look every second for a while; `rates` are per second and session."""
        demand = self.look(wanted, replicas)
        for _ in range(round(seconds)):
            self.now += 1.0
            rates = {"wanted_seconds": 1.0, **rates}
            self.totals += Totals(**{name: rate * wanted for name, rate in rates.items()})
            demand = self.look(wanted, replicas)
        return demand


LATE: dict[str, float] = {
    "idle_seconds": 0.4,
    "lag_seconds": 0.4,
    "lags": 10,
    "step_seconds": 0.2,
    "steps": 10,
}
"""Drafts answer after two target steps, and the target idles."""


def test_sessions_need_replicas_in_proportion() -> None:
    """Four fifths of the slots are planned for."""
    demand = Pool().run(wanted=16, seconds=60)
    assert demand.all_replicas == pytest.approx(16 / (UTILIZATION * SLOTS), rel=1e-3)
    assert demand.own_replicas == demand.all_replicas
    assert demand.sessions_per_replica == UTILIZATION * SLOTS


def test_demand_rises_within_seconds_and_falls_to_nothing() -> None:
    """A mean over some seconds: no reaction to a single short request, all of it to one that stays."""
    pool = Pool(sessions_per_replica=1)
    pool.look(0)
    assert pool.run(wanted=8, seconds=1).all_replicas < 2
    assert pool.run(wanted=8, seconds=3 * MEAN_SECONDS).all_replicas > 7
    fallen = [pool.run(wanted=0, seconds=MEAN_SECONDS).all_replicas for _ in range(8)]
    assert fallen == sorted(fallen, reverse=True)
    assert fallen[-1] == 0.0


def test_nobody_wants_drafts() -> None:
    """Zero, not a small number: whoever may scale to zero does."""
    assert Pool().run(wanted=0, seconds=5) == Demand(sessions_per_replica=UTILIZATION * SLOTS)
    assert Pool().look(0, replicas=0) == Demand()


def test_the_first_replica_is_asked_for_without_knowing_any() -> None:
    """No replica has told its slots: one is needed, however many sessions want it."""
    assert Pool().look(50, replicas=0).all_replicas == pytest.approx(1.0)
    assert Pool(sessions_per_replica=5).look(50, replicas=0).all_replicas == pytest.approx(10.0)


def test_lost_replicas_are_still_needed() -> None:
    """What one serves is remembered when none is left."""
    pool = Pool()
    before = pool.run(wanted=16, seconds=30).all_replicas
    assert pool.run(wanted=16, seconds=30, replicas=0).all_replicas == pytest.approx(before, rel=0.01)


def test_late_drafts_need_replicas_by_how_late_they_are() -> None:
    """As Kubernetes' own rule: current replicas times lag over the lag that is wanted."""
    demand = Pool().run(wanted=6, seconds=JUDGE_SECONDS, replicas=2, **LATE)
    assert demand.all_replicas == pytest.approx(2 * 0.04 / 0.02, rel=0.05)


@pytest.mark.parametrize("spared", ["idle_seconds", "lag_seconds"])
def test_late_alone_or_idle_alone_is_not_short(spared: str) -> None:
    """Idle with a short lag is the network's doing; a long lag without idle costs nothing."""
    demand = Pool().run(wanted=6, seconds=60, replicas=2, **{**LATE, spared: 0.01})
    assert demand.sessions_per_replica == UTILIZATION * SLOTS


def test_a_session_with_a_replica_of_its_own_teaches_nothing() -> None:
    """Its draft is slower than its target, which more replicas would not change."""
    demand = Pool().run(wanted=1, seconds=120, **LATE)
    assert demand.sessions_per_replica == UTILIZATION * SLOTS


def test_sessions_without_a_draft_although_there_is_room() -> None:
    """Replicas that do not admit what they have slots for serve fewer than they say."""
    demand = Pool().run(wanted=4, seconds=JUDGE_SECONDS, missing_seconds=0.4)
    assert demand.sessions_per_replica == pytest.approx(4 * 0.6, rel=0.1)


def test_sessions_without_a_draft_for_want_of_slots() -> None:
    """Full replicas serve well what they have; demand alone says how many more are needed."""
    pool = Pool()
    demand = pool.run(wanted=30, seconds=60, missing_seconds=0.6)
    assert demand.sessions_per_replica == UTILIZATION * SLOTS
    assert math.ceil(demand.all_replicas) == 4


def test_what_was_learned_outlives_its_cause_and_fades() -> None:
    """With enough replicas nothing is short any more, and the pool does not shrink at once for it."""
    pool = Pool()
    learned = pool.run(wanted=6, seconds=JUDGE_SECONDS, **LATE).sessions_per_replica
    assert learned < 6
    kept = pool.run(wanted=6, seconds=120, replicas=3).sessions_per_replica
    assert learned <= kept < 1.1 * learned
    assert pool.run(wanted=6, seconds=FADE_SECONDS, replicas=3).sessions_per_replica > 1.8 * learned


def test_a_change_of_the_pool_begins_a_new_judgement() -> None:
    """What happened with fewer replicas is not held against more of them."""
    pool = Pool()
    pool.run(wanted=6, seconds=JUDGE_SECONDS - 2, **LATE)
    assert pool.run(wanted=6, seconds=JUDGE_SECONDS - 2, replicas=2).sessions_per_replica == 8


def test_a_fixed_number_is_not_learned() -> None:
    """Who knows what a replica serves says it; no more than its slots."""
    assert Pool(sessions_per_replica=4).run(wanted=8, seconds=60, **LATE).all_replicas == pytest.approx(2)
    assert Pool(sessions_per_replica=40).run(wanted=20, seconds=60).all_replicas == pytest.approx(2)


def test_orchestrators_add_up() -> None:
    """Each knows the whole from the others' sessions at the drafts; the shares are the whole."""
    shares = [(5, 11), (8, 8), (3, 13), (0, 16)]
    demands = [Pool(others=others).run(wanted=own, seconds=60) for own, others in shares]
    whole = demands[0].all_replicas
    assert [one.all_replicas for one in demands] == pytest.approx([whole] * 4, rel=1e-3)
    assert sum(one.own_replicas for one in demands) == pytest.approx(whole, rel=1e-3)
    assert demands[-1].own_replicas == 0.0


sums = st.floats(0.0, 1e6)
steps = st.tuples(
    st.integers(0, 500),
    st.integers(0, 500),
    st.integers(0, 20),
    st.integers(0, 100),
    st.floats(-1.0, 1e4),
    st.builds(
        Totals,
        wanted_seconds=sums,
        missing_seconds=sums,
        idle_seconds=sums,
        lag_seconds=sums,
        lags=st.integers(0, 1000),
        step_seconds=sums,
        steps=st.integers(0, 1000),
    ),
)


@given(st.integers(0, 8), st.lists(steps, max_size=30))
def test_whatever_is_seen_the_answer_is_sane(fixed: int, history: list[Any]) -> None:
    """Finite, not negative, the own share no more than all, and never more replicas than sessions ever."""
    scaler, now, totals, most = Scaler(fixed, 1.0), 0.0, Totals(), 0
    for wanted, others, replicas, slots, elapsed, lately in history:
        now, totals, most = now + elapsed, totals + lately, max(most, wanted + others)
        demand = scaler.observe(
            Observation(wanted=wanted, others=others, replicas=replicas, slots=slots, totals=totals), now
        )
        numbers = (demand.own_replicas, demand.all_replicas, demand.sessions, demand.sessions_per_replica)
        assert all(math.isfinite(number) and number >= 0.0 for number in numbers)
        assert demand.own_replicas <= demand.all_replicas * (1 + 1e-9)
        assert demand.all_replicas <= most * (1 + 1e-9)


def test_a_judgement_at_most_halves() -> None:
    """One bad moment asks for no more than twice the replicas."""
    demand = Pool().run(wanted=8, seconds=JUDGE_SECONDS, **{**LATE, "lag_seconds": 1000.0})
    assert demand.sessions_per_replica == pytest.approx(8 * MIN_FACTOR, rel=0.2)


def test_an_orchestrator_that_stood_still_blames_no_draft() -> None:
    """Answers that it read late after ten seconds of standing still do not change the capacity."""
    pool = Pool()
    before = pool.run(wanted=4, seconds=JUDGE_SECONDS + 5)
    pool.now += 10.0
    pool.totals += Totals(
        wanted_seconds=40.0, missing_seconds=30.0, idle_seconds=20.0, lag_seconds=40.0, lags=4, steps=4
    )
    pool.look(4)
    pool.totals += Totals(wanted_seconds=40.0, missing_seconds=30.0)  # read within the next second
    after = pool.run(wanted=4, seconds=2 * JUDGE_SECONDS)
    assert after.sessions_per_replica == before.sessions_per_replica == UTILIZATION * SLOTS
