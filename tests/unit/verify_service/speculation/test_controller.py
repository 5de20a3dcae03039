"""Which sessions of a replica have drafts."""

from __future__ import annotations

from tests.unit.verify_service.fakes import FLAT, make_session
from verify_service.speculation.controller import Controller
from verify_service.verifier import StepResult, StepTimings


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
