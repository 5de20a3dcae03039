"""Whole runs, against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.clients import Arrival, ServedRequest
from simulator.devices import StepTotals
from simulator.report import Run, summarise
from simulator.simulate import simulate
from simulator.topology import ArmKind, Load, Topology
from simulator.traces import Trace, compact
from tests.unit.simulator.conftest import PERFECT, USELESS

LOAD = Load(sessions=3, prompt_tokens=8, new_tokens=20)
SERVICES = (ArmKind.AUTO, ArmKind.SEQUENTIAL, ArmKind.OFF)


@pytest.mark.parametrize("arm", ArmKind)
@pytest.mark.parametrize("guess", [PERFECT, USELESS])
def test_every_client_gets_the_targets_tokens(make_profile, arm, guess):
    """Whatever the drafts are worth; `summarise` compares every token."""
    report = simulate(make_profile(guess), Topology(arm=arm), LOAD)
    assert report.tokens == 60


def test_wrong_tokens_are_noticed(make_profile):
    """The check of every run can fail."""
    served = ServedRequest(0.0, (1, 2), tokens=[1, 3], arrivals=[Arrival(1.0, 2, 0.1)])
    served.statistics.steps = 1
    run = Run(make_profile(), Topology(), LOAD, [served], [StepTotals(1, 1, 1, 1.0)], drafts=[])
    with pytest.raises(AssertionError, match="not the target's"):
        summarise(run)


@pytest.mark.parametrize("arm", SERVICES)
def test_equal_seeds_give_equal_runs(make_profile, arm):
    """To the last digit."""
    topology = Topology(arm=arm, rtt=0.002)
    first, again = (simulate(make_profile(), topology, LOAD) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("sessions", [1, 4])
def test_without_drafts_a_token_takes_a_step(make_profile, sessions):
    """T(S) for every session's token, and nothing between the steps."""
    profile = make_profile(target=((1, 0.010), (2, 0.011), (512, 0.521)))
    report = simulate(profile, Topology(arm=ArmKind.OFF), replace(LOAD, sessions=sessions))
    assert report.per_token_p50 == pytest.approx(0.009 + 0.001 * sessions, rel=0.02)  # ends differ by a step
    assert report.efficiency == pytest.approx(1.0, abs=1e-3)
    assert report.acceptance_length == 1.0


def test_without_drafts_distance_costs_once(make_profile):
    """Steps do not wait for anybody: the round trip is in the first token alone."""
    load = replace(LOAD, sessions=1)
    near, far = (simulate(make_profile(), Topology(arm=ArmKind.OFF, rtt=rtt), load) for rtt in (0.0, 0.1))
    assert far.per_token_p50 == pytest.approx(near.per_token_p50)
    assert far.first_token_p50 == pytest.approx(near.first_token_p50 + 0.1)


@pytest.mark.parametrize("rtt", [0.0, 0.02])
def test_a_sequential_round_is_the_sum_of_its_parts(make_profile, rtt):
    """Verdict to the draft, its steps, blocks to the target, its step: two round trips in all."""
    topology = Topology(arm=ArmKind.SEQUENTIAL, rtt=rtt)
    report = simulate(make_profile(), topology, Load(sessions=1, prompt_tokens=8, new_tokens=280))
    rounds = report.tokens / report.acceptance_length
    assert rounds > 10
    parts = (report.target_busy + report.draft_busy) * report.seconds + rounds * 2 * rtt
    # Of the first round the draft's part is done during the prefill; the last verdict goes to the client.
    assert parts - 0.015 - 2.5 * rtt < report.seconds <= parts


def test_an_idle_draft_s_core_helps_with_long_steps(make_profile):
    """On two cores what 16 tokens take longer than one takes half; up to LONG_ROWS nothing is shared."""
    target = ((1, 0.010), (14, 0.010), (16, 0.030), (512, 0.200))
    alone = make_profile(target=target).model_copy(update={"cores": "two"})
    helped = alone.model_copy(update={"target_helped": 1.0})
    for sessions, before, after in ((8, 0.010, 0.010), (16, 0.030, 0.020)):
        load = replace(LOAD, sessions=sessions)
        slow, quick = (simulate(each, Topology(arm=ArmKind.OFF), load) for each in (alone, helped))
        assert slow.per_token_p50 == pytest.approx(before, rel=0.05)
        assert quick.per_token_p50 == pytest.approx(after, rel=0.05)


def test_a_perfect_draft_hides_behind_the_target(make_profile):
    """Ten draft steps a round, each right: the target never waits and commits many tokens a step."""
    load = Load(sessions=1, prompt_tokens=8, new_tokens=250)
    report = simulate(make_profile(), Topology(arm=ArmKind.AUTO), load)
    assert report.efficiency > 0.95
    assert 8.0 < report.acceptance_length < 12.0


def test_a_useless_draft_costs_little(make_profile):
    """Its nodes are soon not worth verifying, and the target does not wait for them."""
    useless = make_profile(USELESS, target=((1, 0.010), (512, 0.521)))
    load = Load(sessions=4, prompt_tokens=8, new_tokens=100)
    with_drafts, without = (simulate(useless, Topology(arm=arm), load) for arm in (ArmKind.AUTO, ArmKind.OFF))
    assert with_drafts.tokens_per_second > 0.97 * without.tokens_per_second


def test_one_device_for_both_models_does_one_thing_at_a_time(make_profile):
    """Together they are never busier than the clock."""
    report = simulate(make_profile(), Topology(arm=ArmKind.LOCKSTEP), LOAD)
    assert report.devices == 1
    assert report.target_busy + report.draft_busy <= 1.0 + 1e-9


def test_replicas_share_the_sessions(make_profile):
    """Two targets serve twice as many sessions in the same time."""
    one = simulate(make_profile(), Topology(arm=ArmKind.OFF), replace(LOAD, sessions=2))
    two = simulate(make_profile(), Topology(arm=ArmKind.OFF, verify_replicas=2), replace(LOAD, sessions=4))
    assert two.seconds == pytest.approx(one.seconds)
    assert two.step_sessions == one.step_sessions


def test_warming_up_does_not_count(make_profile):
    """Neither its requests nor the work for them are part of the figures."""
    report = simulate(make_profile(), Topology(arm=ArmKind.OFF), replace(LOAD, sessions=1, warm_up=2))
    assert report.tokens == 20
    assert report.target_busy == pytest.approx(1.0)


def test_without_a_draft_replica_the_target_goes_on_alone(make_profile):
    """As with `--draft none`: what `OFF` makes, and no draft is busy."""
    load = replace(LOAD, new_tokens=60)
    without = simulate(make_profile(), Topology(draft_replicas=0), load)
    off = simulate(make_profile(), Topology(arm=ArmKind.OFF), load)
    assert without.tokens == off.tokens == 180
    assert without.draft_busy == 0.0
    assert without.tokens_per_second >= 0.99 * off.tokens_per_second


def test_a_lookup_replica_drafts_what_the_text_repeats(make_profile):
    """The service's own lookup, on a text that says the same again and again."""
    profile = make_profile().model_copy(update={"draft_kind": "lookup"})
    trace = Trace((1, 2, 3), tuple(range(10, 20)) * 12, 1, ())
    load = Load(sessions=1, prompt_tokens=0, new_tokens=100)
    report = simulate(profile, Topology(), load, compact([trace]))
    assert report.tokens == 100
    assert report.acceptance_length > 2.0


def test_rounds_that_warm_up_do_not_count(make_profile):
    """All sessions ask once more before anything is counted."""
    warm = simulate(make_profile(), Topology(), replace(LOAD, warm_up=1, warm_rounds=2))
    assert warm.tokens == 60


def test_a_core_without_drafts_helps_with_every_step(make_profile):
    """T(n) is then the one that was measured so."""
    profile = make_profile().model_copy(update={"cores": "two", "target_quiet": ((1, 0.006), (512, 0.006))})
    load = Load(sessions=1, prompt_tokens=8, new_tokens=40)
    helped = simulate(profile, Topology(draft_replicas=0), load)
    alone = simulate(profile.model_copy(update={"target_quiet": ()}), Topology(draft_replicas=0), load)
    assert helped.per_token_p50 == pytest.approx(0.006, rel=0.05)
    assert alone.per_token_p50 == pytest.approx(0.010, rel=0.05)


@pytest.mark.parametrize(("guess", "wanted"), [(PERFECT, True), (USELESS, False)])
def test_a_report_says_whether_drafts_are_wanted(make_profile, guess, wanted):
    """Useless ones rest after their trial."""
    target = ((1, 0.010), (64, 0.040), (512, 0.3))
    load = Load(sessions=8, rounds=2, prompt_tokens=8, new_tokens=100, warm_rounds=1)
    report = simulate(make_profile(guess, target=target), Topology(), load)
    assert (report.draft_wanted > 0.5) is wanted
