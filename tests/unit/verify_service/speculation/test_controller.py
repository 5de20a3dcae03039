"""Which sessions of a replica have drafts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.protocol.messages import FinishReason, SamplingParams, VerifyPolicy
from tests.unit.verify_service.fakes import FLAT, block, make_session
from verify_service.session import VerifySession
from verify_service.speculation.controller import Controller
from verify_service.speculation.drafting import MIN_STEPS
from verify_service.verifier import SessionOutcome, StepResult, StepTimings


def test_no_session_gets_a_draft_while_prompts_are_computed() -> None:
    """A draft would compute the same prompts beside the target; one that is at work goes on."""
    controller = Controller(FLAT.copy(), 64)
    having, waiting, prompt = (
        make_session(1),
        make_session(2),
        make_session(3, tokens=(1, 2, 3, 4), computed=1),
    )
    waiting.draft_wanted = False
    having.published(0.0, 0.0)
    controller.decide_drafts([having, waiting, prompt], 0.0)
    assert [each.draft_wanted for each in (having, waiting)] == [True, False]
    prompt.release_pages()  # paused: nothing of it is computed
    controller.decide_drafts([having, waiting, prompt], 0.0)
    assert waiting.draft_wanted


def test_a_draft_wanted_before_the_first_verdict_waits_for_prompts_of_others() -> None:
    """The first of several sessions that come at once had the replica to itself for a moment."""
    controller = Controller(FLAT.copy(), 64)
    first, prompt = make_session(1), make_session(2, tokens=(1, 2, 3, 4), computed=1)
    controller.decide_drafts([first, prompt], 0.0)
    assert not first.draft_wanted


def test_a_session_s_own_prompt_keeps_no_draft_from_it() -> None:
    """Its draft computes the prompt beside the target, and answers the first verdict."""
    controller = Controller(FLAT.copy(), 64)
    alone = make_session(1, tokens=(1, 2, 3, 4), computed=1)
    controller.decide_drafts([alone], 0.0)
    assert alone.draft_wanted


def test_a_step_that_warms_up_teaches_nothing() -> None:
    """It took longer than later ones of its size will."""
    controller = Controller(FLAT.copy(), 64)
    timings = StepTimings(start=0.0, start_ns=0, forwarded=9.0, end=9.0)
    before = controller.cost.seconds(4)
    for warming_up, learned in ((True, False), (False, True)):
        step = StepResult([], timings, sessions=1, tokens=4, prompt_tokens=0, warming_up=warming_up)
        controller.observe(step)
        controller.plan([], 10.0)  # nothing is left to do
        assert (controller.cost.seconds(4) > before) is learned


def test_a_step_with_prompts_does_not_teach_what_candidates_cost() -> None:
    """Few tokens of a prompt have logits, so they take less time than as many candidates."""
    controller = Controller(FLAT.copy(), 64)
    for prompt_tokens, learned in ((31, False), (0, True)):
        timings = StepTimings(start=0.0, start_ns=0, forwarded=0.5, end=0.5)
        controller.observe(StepResult([], timings, sessions=1, tokens=32, prompt_tokens=prompt_tokens))
        controller.plan([], 1.0)  # nothing is left to do
        assert (controller.cost.seconds(32) < 1.0) is learned


def beside(extra: float, hits: float, turnaround: float = 0.004) -> tuple[Controller, VerifySession]:
    """A controller after steps beside a draft that took `extra` seconds longer, and the draft's session."""
    controller, drafted = Controller(FLAT.copy(), 64), make_session(1)
    drafted.patience.turnaround, drafted.patience.hits = turnaround, hits
    for number in range(20):
        drafted.propose(block(0, [], base=drafted.tree.committed_length), arrived=float(number))
        controller.plan([drafted], float(number))
        seconds = FLAT.seconds(4) + extra
        timings = StepTimings(
            start=float(number), start_ns=0, forwarded=number + seconds, end=number + seconds
        )
        controller.observe(StepResult([], timings, sessions=1, tokens=4, prompt_tokens=0))
        controller.plan([], number + 0.9)  # nothing is left to do
        controller.decide_turns([drafted], 4)
        if drafted.takes_turns:
            break
    return controller, drafted


@pytest.mark.parametrize(
    ("extra", "hits", "turns"),
    [(0.004, 0.5, True), (0.001, 0.5, False), (0.004, 1.0, False), (0.0, 0.0, False)],
)
def test_drafts_take_turns_where_working_beside_the_target_costs_more_than_it_saves(
    extra: float, hits: float, turns: bool
) -> None:
    """It saves the draft's time in the share of steps in which the draft could be ahead."""
    controller, drafted = beside(extra, hits, turnaround=0.005)
    assert drafted.takes_turns is turns
    controller.plan([drafted], 100.0)
    assert controller.drafts_at_work is not turns


def test_steps_in_turns_with_drafts_teach_nothing_about_steps_without() -> None:
    """Whether drafts pay is judged by these, and a draft in turns may still delay a step."""
    controller, drafted = beside(0.004, hits=0.0)
    controller.plan([drafted], 100.0)
    timings = StepTimings(start=100.0, start_ns=0, forwarded=102.0, end=102.0)
    controller.observe(StepResult([], timings, sessions=1, tokens=4, prompt_tokens=0))
    in_turns = controller.cost.seconds(4)
    controller.plan([], 103.0)
    assert controller.cost.seconds(4) == FLAT.seconds(4) < in_turns


def test_a_sequential_session_takes_turns_from_its_first_verdict_on() -> None:
    """Its draft has nothing to do while the target computes."""
    controller, session = Controller(FLAT.copy(), 64), make_session(1, policy=VerifyPolicy.SEQUENTIAL)
    controller.decide_turns([session], 1)
    assert session.takes_turns


def test_a_sequential_session_keeps_no_draft_from_others() -> None:
    """While it drafts, no step shows what steps without drafts take: a probe would last until it ends."""
    controller, pipelined = Controller(FLAT.copy(), 64), make_session(1)
    sequential = make_session(2, policy=VerifyPolicy.SEQUENTIAL)
    controller._drafting._probe = MIN_STEPS
    controller.decide_drafts([pipelined, sequential], 0.0)
    assert not pipelined.draft_wanted
    outcome = SessionOutcome(sequential, 3, [5], [], 0, 0, 0, False, FinishReason.NONE, ())
    timings = StepTimings(start=0.0, start_ns=0, forwarded=1.0, end=1.0)
    controller.observe(StepResult([outcome], timings, sessions=1, tokens=1, prompt_tokens=0))
    controller.decide_drafts([pipelined, sequential], 1.0)
    assert pipelined.draft_wanted


def test_sessions_that_take_no_steps_do_not_count() -> None:
    """Drafts are judged by steps, and decided about for as many sessions as these have: no paused one."""
    controller, active, paused = Controller(FLAT.copy(), 64), make_session(1), make_session(2)
    paused.release_pages()
    having, now = 0, 0.0
    for _ in range(400):
        active._silence = 0
        having += active.draft_wanted
        timings = StepTimings(start=now, start_ns=0, forwarded=now, end=now + 1.0 + active.draft_wanted)
        controller.plan([active, paused], now)
        outcome = SessionOutcome(active, 3, [5], [], 0, 0, 0, False, FinishReason.NONE, ())
        controller.observe(StepResult([outcome], timings, sessions=1, tokens=1, prompt_tokens=0))
        now = timings.end
        controller.decide_drafts([active, paused], now)
    assert having < 100


def test_a_draft_that_has_not_answered_yet_may_work_beside_the_target() -> None:
    """Nobody knows yet what that saves."""
    controller, session = Controller(FLAT.copy(), 64), make_session(1)
    controller.decide_turns([session], 1)
    assert not session.takes_turns


def test_drafts_in_turns_work_beside_the_target_again_after_some_hundred_steps() -> None:
    """Steps beside drafts may take less time by then than when they were last observed."""
    controller, drafted = beside(0.004, hits=0.1)
    assert drafted.takes_turns
    steps = 0
    while drafted.takes_turns and steps < 1000:
        controller.plan([drafted], 100.0)
        timings = StepTimings(start=100.0, start_ns=0, forwarded=101.0, end=101.0)
        controller.observe(StepResult([], timings, sessions=1, tokens=4, prompt_tokens=0))
        controller.plan([], 102.0)  # nothing is left to do
        controller.decide_turns([drafted], 4)
        steps += 1
    assert 100 < steps < 1000


@pytest.mark.parametrize("end", [VerifySession.release_pages, lambda session: session.commit([1, 2])])
def test_the_draft_of_a_session_that_gets_no_verdicts_is_not_at_work(
    end: Callable[[VerifySession], object],
) -> None:
    """The session is paused, or finished and not closed yet: the draft's cores are free for others."""
    controller, other = Controller(FLAT.copy(), 64), make_session(1, policy=VerifyPolicy.OFF)
    drafted = make_session(2, sampling=SamplingParams(max_tokens=2))
    drafted.propose(block(0, [(-3, 5, 1.0)], base=3), arrived=0.0)
    controller.plan([other, drafted], 1.0)
    assert controller.drafts_at_work
    end(drafted)
    controller.plan([other, drafted], 2.0)
    assert not controller.drafts_at_work
