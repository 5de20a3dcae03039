"""Whether drafts are wanted, for scripted steps of a target whose time is known."""

from __future__ import annotations

import pytest

from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.drafting import (
    FIRST_DRAFTS,
    MAX_KINDS,
    MAX_LOSS,
    MAX_REST,
    MIN_STEPS,
    PROBE_EVERY,
    WINDOW_ROUNDS,
    Drafting,
    ObservedStep,
    SessionRound,
    Traffic,
)

CODE: Traffic = ("code", False)
CHAT: Traffic = ("chat", True)
STEP = 0.010
"""Seconds of a step without drafts, whatever its tokens."""


class Replica:
    """A target and the traffic of its sessions, with places for drafts."""

    def __init__(self, *sessions: Traffic, step: float = STEP, places: int = 1024) -> None:
        self.quiet = CostModel([1, 1024], [step, step], 1024)
        self.drafting = Drafting(self.quiet)
        self.sessions = sessions
        self.places = places
        self.steps = 0

    def step(self, brings: dict[Traffic, float], slowdown: float, prompts: bool = False) -> list[bool]:
        """One step: a draft brings its session so many tokens per round; drafts make it so much longer."""
        room = {traffic: self.drafting.max_drafts(traffic, len(self.sessions)) for traffic in self.sessions}
        wanted = []
        for traffic in self.sessions:
            wanted.append(room[traffic] > 0)
            room[traffic] -= 1
        self.steps += 1
        rounds = []
        having = [want and sum(wanted[:index]) < self.places for index, want in enumerate(wanted)]
        for traffic, draft_wanted, has_draft in zip(self.sessions, wanted, having, strict=True):
            drafted = self._whole(brings[traffic]) if has_draft else 0
            rounds.append(SessionRound(traffic, 1 + drafted, drafted, draft_wanted, has_draft))
        seconds = STEP * (1.0 + slowdown * any(having))
        self.drafting.observe(ObservedStep(rounds, 4 * len(rounds), 2 * sum(having), seconds, prompts))
        return having

    def run(self, steps: int, brings: dict[Traffic, float], slowdown: float) -> dict[Traffic, float]:
        """Share of the steps in which each kind had drafts."""
        having = [self.step(brings, slowdown) for _ in range(steps)]
        shares = [sum(column) / steps for column in zip(*having, strict=True)]
        return dict(zip(self.sessions, shares, strict=True))

    def _whole(self, tokens: float) -> int:
        """Tokens come one by one: 0.25 a round is one in every fourth."""
        return int((self.steps + 1) * tokens) - int(self.steps * tokens)


def test_drafts_that_bring_more_than_their_time_are_kept() -> None:
    """Half a token a round, for a tenth of the time: few sessions draft at first, then all do."""
    replica = Replica(*[CODE] * 16)
    assert sum(replica.step({CODE: 0.5}, slowdown=0.1)) == FIRST_DRAFTS
    replica.run(200, {CODE: 0.5}, slowdown=0.1)
    assert replica.run(1000, {CODE: 0.5}, slowdown=0.1)[CODE] == 1.0


def test_drafts_that_cost_more_time_than_they_bring_rest() -> None:
    """They are tried again ever more seldom, and never for longer than a window."""
    replica = Replica(*[CODE] * 8)
    assert replica.run(200, {CODE: 0.1}, slowdown=0.2)[CODE] < 0.3
    assert replica.run(5000, {CODE: 0.1}, slowdown=0.2)[CODE] < 0.05


def test_the_measurement_at_the_start_condemns_no_draft() -> None:
    """Steps of a service take longer than that; a probe finds out before the first trial is called a loss."""
    replica = Replica(*[CODE] * 8, step=STEP / 1.3)
    having = []
    for _ in range(8 * MIN_STEPS):
        having.append(any(replica.step({CODE: 0.5}, slowdown=0.05)))
        if not having[-1]:
            replica.quiet.observe(32, STEP)
    assert having.count(False) <= 2 * MIN_STEPS
    assert all(having[-MIN_STEPS:])


def test_a_clear_loss_ends_a_trial_early() -> None:
    """Drafts that bring nothing and double the time of a step: no more steps than a window has at least."""
    replica = Replica(*[CODE] * 8)
    replica.drafting.observe(ObservedStep([SessionRound(CODE, 1, 0, False, False)] * 8, 8, 0, STEP, False))
    assert sum(any(replica.step({CODE: 0.0}, slowdown=1.0)) for _ in range(8 * MIN_STEPS)) == MIN_STEPS


def test_drafts_that_begin_to_pay_come_back() -> None:
    """After the longest rest at the latest."""
    replica = Replica(*[CODE] * 8)
    replica.run(3000, {CODE: 0.0}, slowdown=0.2)
    replica.run(MAX_REST, {CODE: 1.0}, slowdown=0.2)
    assert replica.run(100, {CODE: 1.0}, slowdown=0.2)[CODE] == 1.0


def test_a_lone_session_is_judged_as_a_batch_is() -> None:
    """A draft that brings nothing rests; one that pays works but for a probe now and then."""
    assert Replica(CHAT).run(1000, {CHAT: 0.0}, slowdown=0.1)[CHAT] < 0.1
    assert Replica(CHAT).run(1000, {CHAT: 0.5}, slowdown=0.2)[CHAT] == 1.0


def test_a_few_steps_without_luck_are_no_clear_loss() -> None:
    """Tokens that come seldom but many at once: eight steps may have none, and yet the draft pays."""
    assert Replica(CHAT).run(1000, {CHAT: 0.25}, slowdown=0.02)[CHAT] == 1.0


@pytest.mark.parametrize("orchestrators", [1, 2])
def test_kinds_are_judged_apart_however_many_orchestrators_bring_them(orchestrators: int) -> None:
    """Drafting loses for one kind and pays for the other, in the same steps of one replica.

    The engine does not see whose sessions they are: in any order the decision is the same.
    """
    kinds = [CODE, CHAT] * 8 if orchestrators == 2 else [CODE] * 8 + [CHAT] * 8
    replica = Replica(*kinds)
    shares = replica.run(4000, {CODE: 1.0, CHAT: 0.02}, slowdown=0.2)
    assert shares[CODE] > 0.9
    assert shares[CHAT] < 0.1


def test_a_machine_that_slows_down_is_not_the_drafts_fault() -> None:
    """A probe finds that steps without drafts have become as slow; drafting goes on."""
    replica = Replica(*[CODE] * 8, step=STEP / 2)

    def learn(steps: int) -> float:
        having = []
        for _ in range(steps):
            having.append(any(replica.step({CODE: 0.2}, slowdown=0.05)))
            if not having[-1]:
                replica.quiet.observe(32, STEP)
        return sum(having) / steps

    learn(200)
    assert learn(1000) > 0.9


@pytest.mark.parametrize("sessions", [1, 8])
def test_a_pause_of_the_process_is_not_the_drafts_fault(sessions: int) -> None:
    """One step of 30 s, as when a machine stood still: drafts do not rest, but for a probe now and then."""
    replica = Replica(*[CODE] * sessions)
    replica.run(500, {CODE: 0.5}, slowdown=0.1)
    replica.step({CODE: 0.5}, slowdown=30.0 / STEP)
    assert replica.run(1000, {CODE: 0.5}, slowdown=0.1)[CODE] >= 1.0 - 2 * MIN_STEPS / 1000


@pytest.mark.parametrize("brought", [0.2, 1.0])
def test_a_profit_is_checked_against_quiet_steps_now_and_then(brought: float) -> None:
    """A probe of few steps, after which drafting goes on."""
    replica = Replica(*[CODE] * 8)
    replica.run(100, {CODE: 1.0}, slowdown=0.1)
    share = replica.run(4 * PROBE_EVERY, {CODE: brought}, slowdown=0.1)[CODE]
    assert 1.0 - 2 * MIN_STEPS / PROBE_EVERY < share < 1.0


def test_a_batch_of_another_size_is_judged_by_itself() -> None:
    """Eight sessions lose by drafts, one does not; a larger batch than eight begins at rest."""
    replica = Replica(*[CODE] * 8)
    replica.run(WINDOW_ROUNDS, {CODE: 0.0}, slowdown=0.3)
    assert not replica.drafting.max_drafts(CODE, 8)
    assert not replica.drafting.max_drafts(CODE, 16)
    assert replica.drafting.max_drafts(CODE, 1)


def test_steps_with_prompts_and_drafts_that_are_still_opening_say_nothing() -> None:
    """Such steps are long whoever drafts, and few drafts cannot show what all of them bring."""
    replica = Replica(*[CODE] * 8)
    for _ in range(WINDOW_ROUNDS):
        replica.step({CODE: 0.0}, slowdown=1.0, prompts=True)
    opening = [SessionRound(CODE, 1, 0, True, index < 3) for index in range(8)]
    for _ in range(WINDOW_ROUNDS):
        replica.drafting.observe(ObservedStep(opening, 8, 0, 2 * STEP, prompts=False))
    assert replica.drafting.max_drafts(CODE, 8)


def test_drafts_are_judged_where_most_of_those_wanted_never_come() -> None:
    """The only place at the draft replicas is one too many if what it holds brings nothing; else it stays."""
    loss, profit = (Replica(*[CODE] * 8, places=1) for _ in range(2))
    having = [sum(loss.step({CODE: 0.0}, slowdown=0.2)) for _ in range(4000)]
    assert sum(having) < 0.1 * len(having)
    having = [sum(profit.step({CODE: 2.0}, slowdown=0.05)) for _ in range(1000)]
    assert sum(having) > 0.95 * len(having)


def test_sessions_that_never_have_a_draft_are_not_judged() -> None:
    """MODE_OFF shares the steps; what it commits counts as committed without drafts."""
    drafting = Replica().drafting
    rounds = [SessionRound(None, 1, 0, False, False)] * 7 + [SessionRound(CODE, 2, 1, True, True)]
    for _ in range(WINDOW_ROUNDS):
        drafting.observe(ObservedStep(rounds, 10, 1, 1.2 * STEP, prompts=False))
    assert not drafting.max_drafts(CODE, 8)  # a token for a fifth of a step that commits eight


def test_kinds_are_forgotten_beyond_a_bound() -> None:
    """A caller makes up the labels."""
    drafting = Replica().drafting
    for number in range(2 * MAX_KINDS):
        one = SessionRound((str(number), False), 1, 0, True, True)
        drafting.observe(ObservedStep([one, one], 2, 0, STEP, prompts=False))
    assert len(drafting._standings) <= MAX_KINDS


@pytest.mark.parametrize("slowdown", [0.05, 0.3])
def test_a_trial_that_loses_more_is_followed_by_a_longer_rest(slowdown: float) -> None:
    """The trial loses a fixed share of the tokens until the next one; a second failure doubles the rest."""
    replica = Replica(*[CODE] * 16)
    replica.drafting.observe(ObservedStep([SessionRound(CODE, 1, 0, False, False)] * 16, 16, 0, STEP, False))

    def trial_and_rest() -> tuple[int, int]:
        trial = rest = 0
        while replica.drafting.max_drafts(CODE, 16):
            replica.step({CODE: 0.0}, slowdown)
            trial += 1
        while not replica.drafting.max_drafts(CODE, 16):
            replica.step({CODE: 0.0}, slowdown)
            rest += 1
        return trial, rest

    trial, rest = trial_and_rest()
    assert rest == pytest.approx(trial * slowdown / MAX_LOSS, rel=0.1)
    trial, rest = trial_and_rest()
    assert rest == pytest.approx(2 * trial * slowdown / MAX_LOSS, rel=0.1)
