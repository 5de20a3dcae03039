"""The baseline with both models on one device."""

from __future__ import annotations

import pytest

from simulator.lockstep import CHAINS
from simulator.simulate import simulate
from simulator.topology import ArmKind, Load, Topology
from tests.unit.simulator.conftest import USELESS

LOAD = Load(sessions=2, rounds=2, prompt_tokens=8, new_tokens=180)


def test_a_perfect_draft_brings_its_chain_and_one(make_profile):
    """k + 1 tokens in k draft forwards and one of the target, with the best k there is."""
    report = simulate(make_profile(), Topology(arm=ArmKind.LOCKSTEP), LOAD)
    chain = CHAINS[-1]
    assert report.acceptance_length == pytest.approx(chain + 1, rel=0.05)
    assert report.per_token_p50 == pytest.approx((0.010 + chain * 0.001) / (chain + 1), rel=0.02)


def test_with_a_useless_draft_nothing_is_drafted(make_profile):
    """The best chain is then none."""
    report = simulate(make_profile(USELESS), Topology(arm=ArmKind.LOCKSTEP), LOAD)
    assert report.draft_busy == 0.0
    assert report.per_token_p50 == pytest.approx(0.010)


def test_replicas_share_nothing(make_profile):
    """Twice the devices and sessions: the same latency, twice the tokens."""
    one = simulate(make_profile(), Topology(arm=ArmKind.LOCKSTEP), LOAD)
    twice = Load(sessions=4, rounds=2, prompt_tokens=8, new_tokens=180)
    two = simulate(make_profile(), Topology(arm=ArmKind.LOCKSTEP, verify_replicas=2), twice)
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second)
    assert two.tokens_per_second_per_device == pytest.approx(one.tokens_per_second_per_device)
