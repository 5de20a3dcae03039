"""Which sessions, chunks and nodes make a step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from outrider.protocol.messages import SamplingParams, VerifyPolicy
from tests.unit.verify_service.fakes import FLAT, LINEAR, block, chain_block, make_session, step
from verify_service.scheduler import StepPlan, plan_step
from verify_service.session import VerifySession
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.patience import Patience
from verify_service.speculation.several_drafts import MAX_SILENCE

TENTH = CostModel([1, 64], [0.1, 0.1], 64)
MEMORY_BOUND = CostModel([1, 16, 512], [1.0, 1.1, 32.0], 512)


def with_chain(session_id: int, length: int, acceptance: float, **changes: object) -> VerifySession:
    """A session with a chain of candidates."""
    session = make_session(session_id, **changes)
    session.propose(chain_block(0, 3, [1] * length, acceptance), arrived=0.0)
    return session


def node_counts(plan: StepPlan) -> list[int]:
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


def test_candidates_beside_a_prompt_take_the_time_that_they_add() -> None:
    """A step of few sessions has room for candidates; one that a prompt fills is longer by each of them."""
    cost = CostModel([1, 8, 512], [1.0, 1.0, 505.0], 512)
    prompt = make_session(2, tokens=tuple(range(1, 101)), computed=0)
    assert node_counts(plan_step([with_chain(1, 7, 0.8)], 0.0, cost, 512)) == [7]
    assert node_counts(plan_step([with_chain(1, 7, 0.8), prompt], 0.0, cost, 512)) == [0, 0]
    assert node_counts(plan_step([with_chain(1, 7, 0.8), prompt], 0.0, FLAT, 64)) == [7, 0]


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
    reaches = sorted((each.probability for s in sessions for each in s.eligible()), reverse=True)
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


def test_a_prompt_beside_decoding_comes_in_chunks_that_are_computed_well() -> None:
    """Sessions do not wait for larger ones, hardly quicker per token; alone a prompt has the step."""
    cost = CostModel([1, 16, 64, 128, 512], [1.0, 1.1, 3.9, 7.2, 29.0], 512)
    prompt = make_session(9, tokens=[1] * 900, computed=0)
    assert [work.chain for work in plan_step([prompt], 0.0, cost, 512).works] == [512]
    for count in (1, 100):
        plan = plan_step([*(make_session(i) for i in range(count)), prompt], 0.0, cost, 512)
        assert plan.works[-1].chain == 128


def test_a_chunk_is_worth_a_step_where_more_tokens_take_more_time_from_the_first_on() -> None:
    """The rate of its own tokens is the same at any size: it would leave the choice to noise."""
    cost = CostModel([1, 16, 32, 64, 128, 256, 512], [1.0, 1.1, 1.7, 3.5, 7.0, 14.0, 28.0], 512)
    prompt = make_session(9, tokens=[1] * 900, computed=0)
    assert plan_step([make_session(1), prompt], 0.0, cost, 512).works[-1].chain == 128


def test_a_prompt_fills_what_a_step_computes_for_nothing() -> None:
    """Where T hardly rises (memory sets it), the chunk is as large as the step may be."""
    prompt = make_session(9, tokens=[1] * 900, computed=0)
    plan = plan_step([make_session(1), prompt], 0.0, FLAT, 512)
    assert plan.works[-1].chain == 511


def test_more_sessions_than_tokens_take_turns() -> None:
    """Who stepped longest ago goes first."""
    sessions = [make_session(i) for i in range(5)]
    for session in sessions:
        session.last_verdict = session.deadline = float(-session.id)
    plan = plan_step(sessions, 0.0, FLAT, 3)
    assert [work.session.id for work in plan.works] == [4, 3, 2]


def test_only_sequential_sessions_means_waiting_for_the_nearest_deadline() -> None:
    """Without a reason to start there is no work, and the plan says when there will be."""
    sessions = [make_session(i, policy=VerifyPolicy.SEQUENTIAL) for i in (1, 2)]
    sessions[0].deadline, sessions[1].deadline = 7.0, 5.0
    plan = plan_step(sessions, 4.0, FLAT, 64)
    assert (plan.works, plan.until) == ([], 5.0)
    assert plan_step([], 4.0, FLAT, 64).until is None


def test_a_step_takes_every_session_along_but_waiting_sequential_ones() -> None:
    """While the target is busy nobody else can start anyway."""
    sequential = make_session(3, policy=VerifyPolicy.SEQUENTIAL)
    sequential.deadline = 9.0
    plan = plan_step([make_session(1), make_session(2), sequential], 1.0, FLAT, 64)
    assert [work.session.id for work in plan.works] == [1, 2]


def waiting(session_id: int, due: float, probabilities: Sequence[float] = ()) -> VerifySession:
    """A session without candidates that expects a tree of these probabilities, at 5.0, in `due` seconds."""
    session = make_session(session_id)
    session.propose(block(0, []), 0.0)
    session.patience = Patience(
        max_seconds=9.0, turnaround=0.1 + due, ready_probabilities=list(probabilities)
    )
    session.patience.deviation = 0.001
    session.last_verdict = 4.9
    return session


def test_a_step_is_held_for_a_block_that_brings_more_than_a_step_at_once() -> None:
    """One session makes ten tokens a second: a tenth of a second for two tokens is worth it."""
    plan = plan_step([waiting(1, 0.1, [1.0, 1.0])], 5.0, TENTH, 64)
    assert (plan.works, plan.until) == ([], pytest.approx(5.1))
    assert len(plan_step([waiting(1, 0.3, [1.0, 1.0])], 5.0, TENTH, 64).works) == 1


def test_a_draft_that_never_answered_is_not_waited_for() -> None:
    """It computes the prompt first, and how long that takes is not known."""
    session = waiting(1, 0.1, [1.0, 1.0])
    for _ in range(MAX_SILENCE):
        session.published(4.9, 0.0)
    assert len(plan_step([session], 5.0, TENTH, 64).works) == 1


def test_blocks_are_counted_from_the_nearest_on() -> None:
    """Three sessions make thirty tokens a second; the first block alone does not pay, both do."""
    sessions = [make_session(1), waiting(2, 0.1, [1.0, 1.0]), waiting(3, 0.15, [0.9, 0.9, 0.9])]
    assert plan_step(sessions, 5.0, TENTH, 64).until == pytest.approx(5.15)
    sessions[2] = waiting(3, 0.5, [0.9, 0.9, 0.9])
    assert len(plan_step(sessions, 5.0, TENTH, 64).works) == 3


def test_a_full_batch_does_not_wait() -> None:
    """Where a node costs what it brings, nothing is gained by waiting for it."""
    sessions = [waiting(i, 0.001, [0.8]) for i in range(50)]
    assert len(plan_step(sessions, 5.0, MEMORY_BOUND, 512).works) == 50


def test_a_ready_session_is_not_waited_for() -> None:
    """Its block has come; what it holds is all there is."""
    session = waiting(1, 0.1, [1.0, 1.0])
    session.ready = True
    assert len(plan_step([session], 5.0, TENTH, 64).works) == 1


def test_a_block_that_does_not_come_is_not_waited_for_longer() -> None:
    """Past its usual time the step starts without it."""
    session = waiting(1, 0.1, [1.0, 1.0])
    assert len(plan_step([session], 5.11, TENTH, 64).works) == 1


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    """Half of a step goes to the shortest prompts, the other half to the oldest, so that each goes on."""
    oldest, old = (make_session(i, tokens=[1] * 900, computed=0) for i in (1, 2))
    short = [make_session(i, tokens=[1] * 10, computed=0) for i in (3, 4)]
    works = plan_step([oldest, old, *short], 0.0, FLAT, 64).works
    assert [(work.session, work.chain) for work in works] == [(oldest, 44), (short[0], 10), (short[1], 10)]
    many = [make_session(i, tokens=[1] * 10, computed=0) for i in range(3, 13)]
    works = plan_step([oldest, old, *many], 0.0, FLAT, 64).works
    assert (works[0].session, works[0].chain) == (oldest, 32)
    assert [work.session for work in works[1:] if work.completes] == many[:3]


def test_a_prompt_whose_log_probabilities_are_wanted_is_not_overtaken_for_ever() -> None:
    """Rows of the vocabulary's width are few, and half of them are for the oldest prompt too."""
    wanted = SamplingParams(prompt_logprobs=1)
    long, *short = (
        make_session(i, [1] * n, computed=0, sampling=wanted) for i, n in ((1, 400), (2, 70), (3, 70))
    )
    works = plan_step([long, *short], 0.0, FLAT, 256).works
    assert {work.session: work.chain for work in works} == {long: 32, short[0]: 32}


def test_prompts_are_not_held_up() -> None:
    """The first token of a session does not wait for the candidates of another."""
    prompt = make_session(2, tokens=[1] * 10, computed=0)
    assert len(plan_step([waiting(1, 0.1, [1.0] * 9), prompt], 5.0, TENTH, 64).works) == 2


def test_the_price_of_a_node_rises_with_the_load() -> None:
    """Free tokens cost nothing; a full batch asks for more than a lone session."""
    assert plan_step([make_session(1)], 0.0, FLAT, 64).price == 0.0
    prices = [
        plan_step([make_session(i) for i in range(count)], 0.0, MEMORY_BOUND, 512).price
        for count in (1, 8, 32, 128)
    ]
    assert prices == sorted(prices)
    assert prices[0] < 0.01 < 0.9 < prices[-1]


def test_a_disbelieved_draft_gets_no_nodes() -> None:
    """Proposals that claim to be sure and are never right are soon not worth a quarter of a step."""
    cost = CostModel([1, 65], [1.0, 17.0], 64)
    session = make_session(1, sampling=SamplingParams(max_tokens=100))
    for first_id in range(0, 200, 8):
        session.propose(chain_block(first_id, session.tree.committed_length, [6] * 4, 0.99), arrived=0.0)
        step(session, [5])
        session.published(0.0, 0.0)
    session.propose(chain_block(900, session.tree.committed_length, [6] * 4, 0.99), arrived=0.0)
    assert node_counts(plan_step([session], 0.0, cost, 64)) == [0]
    assert node_counts(plan_step([with_chain(2, 4, 0.99)], 0.0, cost, 64)) == [4]


@pytest.mark.parametrize("why", ["finished", "paused", "unread"])
def test_sessions_that_cannot_run_are_left_out(why: str) -> None:
    """Finished, without pages, or with a reader that does not keep up."""
    session = make_session(1)
    if why == "finished":
        session.finished = True
    elif why == "paused":
        session.release_pages()
    else:
        for _ in range(4):
            session.outbox.announce(None)
    assert plan_step([session], 0.0, FLAT, 64) == StepPlan([], None)
