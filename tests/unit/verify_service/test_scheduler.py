"""Which sessions, chunks and nodes make a step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from outrider.messages import SamplingParams, VerifyPolicy
from tests.unit.verify_service.fakes import FLAT, LINEAR, block, chain_block, make_session
from verify_service.cost_model import CostModel
from verify_service.patience import Patience
from verify_service.scheduler import Plan, plan_step
from verify_service.session import Session

MEMORY_BOUND = CostModel([1, 16, 512], [1.0, 1.1, 32.0], 512)


def with_chain(session_id: int, length: int, acceptance: float, **changes: object) -> Session:
    """A session with a chain of candidates."""
    session = make_session(session_id, **changes)
    session.propose(chain_block(0, 3, [1] * length, acceptance), arrived=0.0)
    return session


def node_counts(plan: Plan) -> list[int]:
    """Nodes of each work, in the order of the sessions."""
    return [len(work.nodes) for work in sorted(plan.works, key=lambda work: work.session.id)]


def test_free_tokens_take_every_node() -> None:
    """Where more tokens cost nothing, all nodes up to the session's cap are verified."""
    assert node_counts(plan_step([with_chain(1, 12, 0.5)], 0.0, FLAT, 64)) == [8]


def test_dear_tokens_take_no_node() -> None:
    """Where a node costs as much as a step and is less than certain, none pays."""
    assert node_counts(plan_step([with_chain(1, 8, 0.9)], 0.0, LINEAR, 64)) == [0]


def test_few_sessions_get_long_blocks_and_many_short_ones() -> None:
    """The same candidates get fewer nodes per session as the batch grows, down to none."""
    means = []
    for count in (1, 4, 16, 48, 200):
        sessions = [with_chain(i, 8, 0.8) for i in range(count)]
        counts = node_counts(plan_step(sessions, 0.0, MEMORY_BOUND, 512))
        means.append(sum(counts) / count)
    assert all(a >= b for a, b in pairwise(means))
    assert means[0] == 8
    assert means[-1] < 1


def test_a_flat_stretch_behind_a_step_is_used() -> None:
    """T may rise by a step that the first node does not pay for but all that fit behind it do."""
    cost = CostModel([1, 2, 8], [1.0, 1.6, 1.6], 64)
    assert node_counts(plan_step([with_chain(1, 7, 0.3)], 0.0, cost, 64)) == [0]
    assert node_counts(plan_step([with_chain(1, 7, 0.8)], 0.0, cost, 64)) == [7]


def test_likely_nodes_come_first_over_all_sessions() -> None:
    """A session with a good draft gets the nodes that one with a poor draft does not."""
    good, poor = with_chain(1, 8, 0.95), with_chain(2, 8, 0.3)
    plan = plan_step([good, poor], 0.0, MEMORY_BOUND, 8)
    assert node_counts(plan)[0] > node_counts(plan)[1]


def test_rate_is_at_its_best() -> None:
    """No other number of best nodes has a higher expected rate."""
    draw = random.Random(5)
    sessions = [with_chain(i, 8, draw.uniform(0.1, 0.99)) for i in range(6)]
    plan = plan_step(sessions, 0.0, MEMORY_BOUND, 512)
    reaches = sorted((n.reach for s in sessions for n in s.eligible_nodes()), reverse=True)
    rates = [(6 + sum(reaches[:k])) / MEMORY_BOUND.seconds(6 + k) for k in range(len(reaches) + 1)]
    assert rates[sum(node_counts(plan))] == max(rates)


def test_a_node_comes_with_its_parent() -> None:
    """Random trees: every chosen node's parent is chosen too, and before it."""
    draw = random.Random(3)
    session = make_session(1)
    parents = [-3 if i < 3 else draw.randrange(i) for i in range(40)]
    session.propose(block(0, [(p, draw.randrange(13), draw.random()) for p in parents]), arrived=0.0)
    nodes = plan_step([session], 0.0, MEMORY_BOUND, 64).works[0].nodes
    seen = set()
    for node in nodes:
        assert node.parent is None or node.parent.id in seen
        seen.add(node.id)


def test_nothing_is_verified_that_could_not_be_committed() -> None:
    """With two tokens to go, a node at depth two would only repeat what its parent's row says."""
    session = with_chain(1, 8, 0.9, sampling=SamplingParams(max_tokens=2))
    assert node_counts(plan_step([session], 0.0, FLAT, 64)) == [1]


def test_policy_off_verifies_nothing_and_never_waits() -> None:
    """Its blocks are dropped."""
    session = with_chain(1, 8, 0.9, policy=VerifyPolicy.OFF)
    assert node_counts(plan_step([session], 0.0, FLAT, 64)) == [0]
    assert len(session.tree) == 0


def test_prefill_takes_what_decoding_leaves() -> None:
    """Decoding sessions and their nodes go first; prompts share the rest in the order of their age."""
    decode = with_chain(1, 3, 0.9)
    first = make_session(2, tokens=[1] * 10, computed=0)
    second = make_session(3, tokens=[1] * 30, computed=0)
    plan = plan_step([decode, first, second], 0.0, FLAT, 24)
    assert [(w.session.id, w.chain, w.completes) for w in plan.works] == [
        (1, 1, True),
        (2, 10, True),
        (3, 10, False),
    ]
    assert sum(work.tokens for work in plan.works) == 24


def test_nodes_leave_room_for_waiting_prompts() -> None:
    """However many nodes pay, half of the step is left to prompts."""
    decodes = [with_chain(i, 8, 0.99) for i in range(6)]
    prompt = make_session(9, tokens=[1] * 100, computed=0)
    plan = plan_step([*decodes, prompt], 0.0, FLAT, 26)
    assert plan.works[-1].chain == 10
    assert sum(work.tokens for work in plan.works) == 26


def test_more_sessions_than_tokens_take_turns() -> None:
    """Who stepped longest ago goes first."""
    sessions = [make_session(i) for i in range(5)]
    for session in sessions:
        session.last_verdict = session.deadline = float(-session.id)
    plan = plan_step(sessions, 0.0, FLAT, 3)
    assert [work.session.id for work in plan.works] == [4, 3, 2]


def test_nobody_ready_means_waiting_for_the_nearest_deadline() -> None:
    """Without a reason to start there is no work, and the plan says when there will be."""
    sessions = [make_session(1), make_session(2)]
    sessions[0].deadline, sessions[1].deadline = 7.0, 5.0
    plan = plan_step(sessions, 4.0, FLAT, 64)
    assert (plan.works, plan.until) == ([], 5.0)
    assert plan_step([], 4.0, FLAT, 64).until is None


def test_a_step_that_starts_takes_waiting_sessions_along() -> None:
    """While the target is busy nobody can start anyway; only sequential sessions stay out."""
    ready, waiting = make_session(1), make_session(2)
    sequential = make_session(3, policy=VerifyPolicy.SEQUENTIAL)
    waiting.deadline = sequential.deadline = 9.0
    plan = plan_step([ready, waiting, sequential], 1.0, FLAT, 64)
    assert [work.session.id for work in plan.works] == [1, 2]


def waiting(session_id: int, due: float, gain: float) -> Session:
    """A session that makes ten tokens a second and, at 5.0, expects a block at `due` (0: none)."""
    session = make_session(session_id)
    session.patience = Patience(max_seconds=9.0)
    session.patience.stepped(10, 1.0)
    session.last_verdict = 4.9
    if due:
        session.patience.answered(due - 4.9)
        session.deadline = 6.0
    session.gain = gain
    return session


def test_a_step_is_held_for_blocks_that_are_due_soon() -> None:
    """While they bring more than all sessions make until then, counted from the nearest on."""
    sessions = [waiting(1, 0.0, 0.0), waiting(2, 5.1, 5.0), waiting(3, 5.2, 5.0)]
    assert plan_step(sessions, 5.0, FLAT, 64).until == pytest.approx(5.1)
    sessions[1].gain = 2.0
    assert plan_step(sessions, 5.0, FLAT, 64).until == pytest.approx(5.2)
    assert len(plan_step(sessions, 6.0, FLAT, 64).works) == 3


def test_a_step_is_not_held_for_what_comes_late_or_brings_little() -> None:
    """Thirty tokens a second are not given up for five tokens in half a second."""
    sessions = [waiting(1, 0.0, 0.0), waiting(2, 5.5, 5.0), waiting(3, 5.6, 1.0)]
    assert len(plan_step(sessions, 5.0, FLAT, 64).works) == 3


def test_prompts_are_not_held_up() -> None:
    """The first token of a session does not wait for the candidates of another."""
    prompt = make_session(2, tokens=[1] * 10, computed=0)
    assert len(plan_step([waiting(1, 5.1, 9.0), prompt], 5.0, FLAT, 64).works) == 2


@pytest.mark.parametrize("why", ["finished", "paused", "unread"])
def test_sessions_that_cannot_run_are_left_out(why: str) -> None:
    """Finished, without pages, or with a reader that does not keep up."""
    session = make_session(1)
    if why == "finished":
        session.finished = True
    elif why == "paused":
        session.pause()
    else:
        for _ in range(4):
            session.outbox.announce(None)
    assert plan_step([session], 0.0, FLAT, 64) == Plan([], None)
