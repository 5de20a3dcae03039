"""Drafts are given up while they do not pay, and it is found out when they do again."""

from __future__ import annotations

from typing import Any

from orchestrator.payoff import (
    FIRST_DRAFTS,
    MAX_KINDS,
    MOST_PROBE_EVERY,
    PROBE_EVERY,
    PROBE_ROUNDS,
    QUIET_SECONDS,
    Payoff,
    Payoffs,
)
from outrider.messages import StepTimes, Verdict


def round_of(
    accepted: int, verified: int, price: float, batch_size: int = 8, lookup_verified: int = 0
) -> Verdict:
    """A verdict of a step of 50 milliseconds."""
    return Verdict(
        step=3,
        base_length=7,
        tokens=tuple(range(accepted + 1)),
        verified=verified,
        accepted=accepted,
        lookup_verified=lookup_verified,
        node_price=price,
        batch_size=batch_size,
        times=StepTimes(forward_us=50_000),
    )


GOOD = round_of(3, 4, price=0.1)
BAD = round_of(0, 4, price=0.3)


def after(rounds: int, verdict: Verdict, payoff: Payoff | None = None, **how: Any) -> Payoff:
    """A payoff that has seen one round again and again."""
    payoff = payoff or Payoff()
    for _ in range(rounds):
        payoff.drafted(verdict, how.get("blocks", 1), now=0.0, probes=how.get("probes", False))
    return payoff


def rested() -> Payoff:
    """One that rests since a batch of eight."""
    return after(500, BAD)


def rounds_to_probe(payoff: Payoff) -> int:
    """Rounds without a draft until the next probe."""
    for count in range(10 * MOST_PROBE_EVERY):
        if payoff.take_probe():
            return count
        payoff.alone(round_of(0, 0, 0.3), now=0.0)
    raise AssertionError("no probe")


def test_cheap_nodes_pay() -> None:
    """Two accepted of eight that cost a fortieth each."""
    assert after(500, round_of(2, 8, price=0.025)).pays


def test_dear_nodes_do_not() -> None:
    """Four accepted of ten that cost half a token each."""
    assert not after(500, round_of(4, 10, price=0.5)).pays


def test_small_gains_do_not_pay_for_blocks_in_a_large_batch() -> None:
    """A tenth of a token per round; two blocks keep 32 sessions from as much and more, two sessions not."""
    assert not after(500, round_of(1, 1, price=0.9, batch_size=32), blocks=2).pays
    assert after(500, round_of(1, 1, price=0.9, batch_size=2), blocks=2).pays


def test_where_the_target_has_a_device_blocks_cost_it_little() -> None:
    """The same rounds pay there."""
    dear = round_of(1, 1, price=0.9, batch_size=32)
    assert not after(500, dear, Payoffs().of("", True, "cpu")).pays
    assert after(500, dear, Payoffs().of("", True, "cuda:0")).pays


def test_tokens_of_a_lookup_are_not_the_draft_s() -> None:
    """What the verify side found by itself says nothing for drafting."""
    assert not after(500, round_of(3, 3, price=0.01, lookup_verified=3)).pays


def test_a_lone_session_keeps_its_draft() -> None:
    """A block costs nobody else's time where nobody else is."""
    assert after(500, round_of(0, 4, price=0.3, batch_size=1)).pays


def test_it_takes_some_rounds_to_give_up() -> None:
    """Neither the first bad rounds nor one after good ones decide."""
    assert after(8, BAD).pays
    assert after(1, BAD, after(100, GOOD)).pays


def test_a_good_probe_brings_drafts_back() -> None:
    """After so many rounds without drafts one session tries, and its rounds together decide."""
    payoff = rested()
    assert rounds_to_probe(payoff) == PROBE_EVERY
    assert not after(PROBE_ROUNDS - 1, GOOD, payoff, probes=True).pays
    assert after(1, GOOD, payoff, probes=True).pays


def test_only_the_probe_decides() -> None:
    """Sessions that are about to give their drafts up bring nothing back."""
    assert not after(500, GOOD, rested()).pays


def test_probes_in_vain_become_rare() -> None:
    """Each doubles the time to the next, up to a bound."""
    payoff = rested()
    waits = []
    for _ in range(6):
        waits.append(rounds_to_probe(payoff))
        after(PROBE_ROUNDS, BAD, payoff, probes=True)
    assert waits[:3] == [PROBE_EVERY, 2 * PROBE_EVERY, 4 * PROBE_EVERY]
    assert waits[-2:] == [MOST_PROBE_EVERY] * 2


def test_a_long_time_of_paying_makes_probes_frequent_again() -> None:
    """What was learned of probes in vain is old by then."""
    payoff = rested()
    rounds_to_probe(payoff)
    after(PROBE_ROUNDS, BAD, payoff, probes=True)
    rounds_to_probe(payoff)
    after(PROBE_ROUNDS, GOOD, payoff, probes=True)
    after(MOST_PROBE_EVERY + 1, GOOD, payoff)
    after(500, BAD, payoff)
    assert rounds_to_probe(payoff) == PROBE_EVERY


def test_a_batch_of_half_the_size_is_probed_at_once() -> None:
    """Nodes are cheaper there; sessions that left do not need to come back first."""
    payoff = rested()
    payoff.alone(round_of(0, 0, 0.3, batch_size=5), now=0.0)
    assert not payoff.take_probe()
    payoff.alone(round_of(0, 0, 0.3, batch_size=4), now=0.0)
    assert payoff.take_probe()
    assert not payoff.take_probe()


def test_the_last_session_of_a_batch_gets_a_draft() -> None:
    """Alone it should have one whatever the batch said."""
    payoff = rested()
    payoff.alone(round_of(0, 0, 0.3, batch_size=1), now=0.0)
    assert payoff.pays


def test_who_follows_a_lone_session_begins_with_a_draft() -> None:
    """It may be alone too; of a batch few do."""
    payoff = rested()
    assert not payoff.admits(0.0)
    payoff.alone(round_of(0, 0, 0.3, batch_size=1), now=0.0)
    for _ in range(FIRST_DRAFTS):
        assert payoff.admits(0.0)
        payoff.join()
    assert not payoff.admits(0.0)


def test_only_the_first_session_after_a_quiet_time_begins_with_a_draft() -> None:
    """It may be the only one; while drafts rest, those that follow begin without."""
    payoff = rested()
    assert not payoff.admits(QUIET_SECONDS / 2)
    assert payoff.admits(QUIET_SECONDS / 2 + QUIET_SECONDS)
    assert not payoff.admits(QUIET_SECONDS / 2 + QUIET_SECONDS)
    assert Payoff().admits(0.0)


def test_sessions_with_drafts_double_while_those_pay() -> None:
    """Few at first; more after rounds that paid, if there are as many; few again after a rest."""
    payoff = Payoff()
    for _ in range(FIRST_DRAFTS):
        assert payoff.admits(0.0)
        payoff.join()
    assert not payoff.admits(0.0)
    assert after(PROBE_ROUNDS, GOOD, payoff).has_room
    for _ in range(FIRST_DRAFTS):
        payoff.join()
    assert not payoff.has_room
    after(500, BAD, payoff)
    for _ in range(FIRST_DRAFTS):
        payoff.leave()
    after(PROBE_ROUNDS, round_of(3, 4, price=0.1, batch_size=1), payoff)
    assert payoff.pays
    assert not payoff.has_room


def test_drafts_that_are_not_used_bring_no_more_of_them() -> None:
    """What one session's rounds brought says nothing of a hundred."""
    payoff = Payoff()
    payoff.join()
    after(500, GOOD, payoff)
    for _ in range(FIRST_DRAFTS - 1):
        assert payoff.has_room
        payoff.join()
    assert not payoff.has_room


def test_kinds_of_traffic_are_weighed_apart() -> None:
    """Greedy and sampled, and every task; the kind seen longest ago makes room."""
    payoffs = Payoffs()
    code = payoffs.of("code", sampled=False, device="cpu")
    assert payoffs.of("code", sampled=False, device="cpu") is code
    assert payoffs.of("code", sampled=True, device="cpu") is not code
    for number in range(MAX_KINDS):
        payoffs.of(f"task {number}", sampled=False, device="cpu")
    assert payoffs.of("code", sampled=False, device="cpu") is not code
