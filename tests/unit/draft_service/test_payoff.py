"""Drafting rests while it does not pay, and finds out when it does again."""

from __future__ import annotations

from dataclasses import replace

from draft_service.payoff import PROBE_EVERY, PROBE_ROUNDS, Payoff, probing
from draft_service.scheduler import choose, is_ready, should_send
from draft_service.session import DraftSession
from tests.unit.draft_service.fakes import FixedCalibration, limits, request, verdict


def round_of(accepted: int, verified: int, price: float, batch_size: int = 1):
    """A verdict."""
    return replace(
        verdict(3, 7), accepted=accepted, verified=verified, node_price=price, batch_size=batch_size
    )


def after(rounds: int, step, payoff: Payoff | None = None, blocks: int = 2, rate: float = 100.0) -> Payoff:
    """A payoff that has seen one round again and again."""
    payoff = payoff or Payoff()
    for _ in range(rounds):
        payoff.observe(step, blocks, rate)
    return payoff


def test_cheap_nodes_pay():
    """One session: two accepted of eight that cost a fortieth each."""
    assert after(500, round_of(2, 8, price=0.025)).pays


def test_dear_nodes_do_not():
    """Four accepted of ten that cost half a token each."""
    assert not after(500, round_of(4, 10, price=0.5)).pays


def test_small_gains_do_not_pay_for_blocks_in_a_large_batch():
    """A tenth of a token per round; two blocks keep a replica of 32 sessions from as much and more."""
    step = round_of(1, 1, price=0.9, batch_size=32)
    assert not after(500, step, rate=20.0).pays
    assert after(500, replace(step, batch_size=1), rate=20.0).pays


def test_tokens_of_a_lookup_are_not_the_draft_s():
    """What the verify side found by itself says nothing for drafting."""
    step = replace(round_of(3, 3, price=0.01), lookup_verified=3)
    assert not after(500, step).pays


def test_it_takes_some_rounds_to_give_up_and_as_few_to_come_back():
    """Neither one bad round nor one good round decides."""
    bad, good = round_of(0, 4, price=0.3), round_of(3, 4, price=0.1)
    assert after(8, bad).pays
    payoff = after(500, bad)
    assert not payoff.pays
    assert after(100, good, payoff).pays


def test_a_resting_session_shows_a_sign_of_life_and_probes_in_turn():
    """Of 64 rounds it drafts in eight, other sessions in others; in between it sends one empty block."""
    payoff = after(500, round_of(0, 4, price=0.9))
    active = []
    for step in range(PROBE_EVERY):
        held = DraftSession(1, request(), limits(), FixedCalibration(), payoff)
        held.commit(verdict(3, 7, step=step, batch_size=2), now=0.0)
        assert held.resting is not probing(1, step, 1)
        assert bool(choose([held], 8)) is not held.resting
        assert not (held.resting and is_ready(held, 8, 0.001))
        assert should_send(held, ready=False, now=0.0) is held.resting
        if held.resting:
            assert len(held.next_block(ready=False, now=0.0)) == 0
            assert not should_send(held, ready=False, now=9.0)
        active.append(not held.resting)
    assert sum(active) == PROBE_ROUNDS
    assert active != [probing(2, step, 1) for step in range(PROBE_EVERY)]


def test_in_a_large_batch_about_one_session_probes_at_a_time():
    """However many they are."""
    for step in range(0, 4096, 37):
        assert sum(probing(key, step, batch_size=64) for key in range(64)) <= 1


def test_a_sequential_session_never_rests():
    """Its target waits for the block."""
    payoff = after(500, round_of(0, 4, price=0.9))
    for step in range(PROBE_EVERY):
        opening = request(pipelined=False)
        held = DraftSession(1, opening, limits(), FixedCalibration(), payoff)
        held.commit(verdict(3, 7, step=step, batch_size=2), now=0.0)
        assert not held.resting


def test_a_session_alone_never_rests():
    """Nobody else's time is at stake, and the target takes no nodes that do not pay."""
    payoff = after(500, round_of(0, 4, price=0.9))
    held = DraftSession(1, request(), limits(), FixedCalibration(), payoff)
    held.commit(verdict(3, 7, step=63, batch_size=1), now=0.0)
    assert not held.resting


def test_rounds_before_the_first_block_say_nothing():
    """The draft still computes the prompt."""
    payoff = Payoff()
    before = payoff._mean
    assert after(500, round_of(0, 0, price=0.9), payoff, blocks=0)._mean == before
