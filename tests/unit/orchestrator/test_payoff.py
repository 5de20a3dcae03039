"""Drafts are given up while they do not pay, and it is found out when they do again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.payoff import (
    ENOUGH_ROUNDS,
    FIRST_DRAFTS,
    LOOK_AFTER,
    LOOK_STEPS,
    MAX_KINDS,
    MAX_REST,
    QUIET_SECONDS,
    REST,
    Payoff,
    Payoffs,
)
from outrider.messages import StepTimes, Verdict


def round_of(accepted: int, verified: int, price: float, batch_size: int = 8, **fields: Any) -> Verdict:
    """A verdict after a round of 50 milliseconds."""
    fields.setdefault("times", StepTimes(forward_us=50_000))
    return Verdict(
        step=3,
        base_length=7,
        tokens=tuple(range(accepted + 1)),
        verified=verified,
        accepted=accepted,
        node_price=price,
        batch_size=batch_size,
        **fields,
    )


GOOD = round_of(3, 4, price=0.1)
BAD = round_of(0, 4, price=0.3, times=StepTimes(forward_us=60_000))
LITTLE = round_of(1, 4, price=0.2)
PLAIN = round_of(0, 0, price=0.3)


def after(rounds: int, verdict: Verdict, payoff: Payoff | None = None, blocks: int = 1) -> Payoff:
    """A payoff that has seen one round with a draft again and again."""
    payoff = payoff or Payoff()
    for _ in range(rounds):
        payoff.drafted(verdict, blocks, now=0.0)
    return payoff


def estimated(verdict: Verdict, payoff: Payoff | None = None, blocks: int = 1) -> bool:
    """Whether drafting pays by estimate, before the first look."""
    return after(LOOK_AFTER - 1, verdict, payoff, blocks).pays


def rest_out(payoff: Payoff, batch_size: int = 8, plain: Verdict = PLAIN) -> int:
    """Rounds without a draft until drafting is tried again."""
    for count in range(10 * MAX_REST):
        if payoff.pays:
            return count
        payoff.alone(replace(plain, batch_size=batch_size), now=0.0)
    raise AssertionError("no trial")


def rested() -> Payoff:
    """One that rests since a batch of eight."""
    payoff = Payoff()
    while payoff.pays:
        payoff.drafted(BAD, 1, now=0.0)
    return payoff


def test_cheap_nodes_pay() -> None:
    """Two accepted of eight that cost a fortieth each."""
    assert estimated(round_of(2, 8, price=0.025))


def test_dear_nodes_do_not() -> None:
    """Four accepted of ten that cost half a token each."""
    assert not estimated(round_of(4, 10, price=0.5))


def test_small_gains_do_not_pay_for_blocks_in_a_large_batch() -> None:
    """A tenth of a token per round; four blocks keep 32 sessions from more, two sessions not."""
    assert not estimated(round_of(1, 1, price=0.9, batch_size=32), blocks=4)
    assert estimated(round_of(1, 1, price=0.9, batch_size=2), blocks=4)


def test_where_the_target_has_a_device_blocks_cost_it_little() -> None:
    """The same rounds pay there."""
    dear = round_of(1, 1, price=0.9, batch_size=32)
    assert not estimated(dear, Payoffs().of("", True, "cpu"), blocks=4)
    assert estimated(dear, Payoffs().of("", True, "cuda:0"), blocks=4)


def test_tokens_of_a_lookup_are_not_the_draft_s() -> None:
    """What the verify side found by itself says nothing for drafting."""
    assert not estimated(round_of(3, 3, price=0.01, lookup_verified=3))


def test_a_lone_session_keeps_its_draft() -> None:
    """A block costs nobody else's time where nobody else is, and nobody looks what there is without."""
    assert after(10 * MAX_REST, round_of(0, 4, price=0.3, batch_size=1)).pays


def test_it_takes_some_rounds_to_give_up() -> None:
    """Neither the first bad rounds nor one after good ones decide."""
    assert after(8, BAD).pays
    assert after(1, BAD, after(100, GOOD)).pays


def test_now_and_then_it_is_looked_what_is_committed_without_drafts() -> None:
    """For some steps, after four times as many rounds each time; then drafting goes on."""
    payoff, rounds = Payoff(), []
    for _ in range(5):
        rounds.append(0)
        while payoff.pays:
            payoff.drafted(LITTLE, 1, now=0.0)
            rounds[-1] += 1
        assert rest_out(payoff) == LOOK_STEPS * LITTLE.batch_size
    assert rounds == [LOOK_AFTER, 4 * LOOK_AFTER, 16 * LOOK_AFTER, 8192, 8192]


def test_nobody_looks_while_the_estimate_is_clear() -> None:
    """Steps without drafts would cost a lot then."""
    assert after(2 * MAX_REST, GOOD).pays


@pytest.mark.parametrize(("seconds", "pays"), [(0.04, False), (0.06, True)])
def test_rounds_are_held_against_those_without_drafts(seconds: float, pays: bool) -> None:
    """Two tokens per round of a tenth of a second, by estimate a small profit: is one without so long?"""
    drafted = round_of(1, 1, price=0.8, times=StepTimes(forward_us=100_000))
    payoff = after(LOOK_AFTER, drafted)
    rest_out(payoff, plain=replace(PLAIN, times=StepTimes(forward_us=round(seconds * 1e6))))
    assert after(LOOK_AFTER, drafted, payoff).pays is pays


def test_rounds_with_prompts_are_no_measure() -> None:
    """They are long whether there are drafts or not."""
    assert after(10 * LOOK_AFTER, replace(BAD, prompt_tokens=100)).pays


def test_after_a_rest_drafting_is_tried_again() -> None:
    """For longer each time it was in vain, up to a bound."""
    payoff, rests = Payoff(), []
    for _ in range(6):
        while payoff.pays:
            payoff.drafted(BAD, 1, now=0.0)
        rests.append(rest_out(payoff))
    assert rests[:3] == [REST, 2 * REST, 4 * REST]
    assert rests[-2:] == [MAX_REST] * 2


def test_a_long_time_of_paying_makes_rests_short_again() -> None:
    """What was learned of trials in vain is old by then."""
    payoff = rested()
    assert rest_out(payoff) == REST
    for _ in range(MAX_REST + 1):
        payoff.drafted(GOOD, 1, now=0.0)
        if not payoff.pays:
            assert rest_out(payoff) == LOOK_STEPS * GOOD.batch_size
    while payoff.pays:
        payoff.drafted(BAD, 1, now=0.0)
    assert rest_out(payoff) == REST


def test_only_rounds_without_a_draft_shorten_a_rest() -> None:
    """Sessions that are about to give their drafts up do not."""
    assert not after(2 * MAX_REST, GOOD, rested()).pays


def test_batch_sizes_are_weighed_apart() -> None:
    """Half a batch that rests may pay; a batch of twice the size rests like it until its own trial."""
    payoff = rested()
    payoff.alone(replace(PLAIN, batch_size=5), now=0.0)
    assert not payoff.pays
    payoff.alone(replace(PLAIN, batch_size=4), now=0.0)
    assert payoff.pays
    payoff.alone(replace(PLAIN, batch_size=7), now=0.0)
    assert payoff.pays
    payoff.alone(PLAIN, now=0.0)
    assert not payoff.pays
    payoff.alone(replace(PLAIN, batch_size=16), now=0.0)
    assert not payoff.pays


def test_the_last_session_of_a_batch_gets_a_draft() -> None:
    """Alone it should have one whatever the batch said."""
    payoff = rested()
    payoff.alone(replace(PLAIN, batch_size=1), now=0.0)
    assert payoff.pays


def test_who_follows_a_lone_session_begins_with_a_draft() -> None:
    """It may be alone too; of a batch few do."""
    payoff = rested()
    assert not payoff.admits(0.0)
    payoff.alone(replace(PLAIN, batch_size=1), now=0.0)
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
    assert after(ENOUGH_ROUNDS, GOOD, payoff).has_room
    for _ in range(FIRST_DRAFTS):
        payoff.join()
    assert not payoff.has_room
    while payoff.pays:
        payoff.drafted(BAD, 1, now=0.0)
    for _ in range(FIRST_DRAFTS):
        payoff.leave()
    rest_out(payoff)
    assert not payoff.has_room


def test_drafts_that_are_not_used_bring_no_more_of_them() -> None:
    """What one session's rounds brought says nothing of a hundred."""
    payoff = Payoff()
    payoff.join()
    after(LOOK_AFTER - 1, GOOD, payoff)
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
