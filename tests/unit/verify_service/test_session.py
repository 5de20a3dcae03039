"""One session: where it ends, what its blocks do, when it may start."""

from __future__ import annotations

import pytest

from outrider.protocol.messages import FinishReason, SamplingParams, VerifyPolicy
from tests.unit.verify_service.fakes import LIMITS, block, chain_block, make_session, step

STOP, LENGTH, NONE = FinishReason.STOP, FinishReason.LENGTH, FinishReason.NONE


@pytest.mark.parametrize(
    ("sampling", "tokens", "kept", "finish"),
    [
        ({}, [5, 6], [5, 6], NONE),
        ({"max_tokens": 3}, [5, 6], [5, 6], NONE),
        ({"max_tokens": 2}, [5, 6], [5, 6], LENGTH),
        ({"max_tokens": 2}, [5, 6, 7], [5, 6], LENGTH),
        ({"stop_token_ids": (6,)}, [5, 6, 7], [5, 6], STOP),
        ({"stop_token_ids": (6,), "max_tokens": 2}, [5, 6, 7], [5, 6], STOP),
        ({"stop_token_ids": (6,), "min_tokens": 2}, [5, 6, 7, 6, 8], [5, 6, 7, 6], STOP),
        ({"stop_token_ids": (6,), "min_tokens": 9}, [6, 6, 6], [6, 6, 6], NONE),
    ],
)
def test_a_generation_ends_where_it_must(
    sampling: dict[str, object], tokens: list[int], kept: list[int], finish: FinishReason
) -> None:
    """What follows a stop token or the last token of all is cut off."""
    session = make_session(sampling=SamplingParams(**sampling))
    committed = session.commit(tokens)
    assert (committed.tokens, committed.finish, session.finished) == (kept, finish, finish is not NONE)
    assert session.tree.committed == [1, 2, 3, *kept]


def test_end_of_sequence_is_the_models_own_unless_ignored() -> None:
    """The replica's end-of-sequence tokens stop a generation that does not ask otherwise."""
    for ignore, finish in ((False, STOP), (True, NONE)):
        session = make_session(sampling=SamplingParams(ignore_eos=ignore))
        session._stops = frozenset() if ignore else frozenset({7})
        assert session.commit([7]).finish is finish


def test_the_context_ends_a_generation() -> None:
    """The last token fills the context."""
    session = make_session(tokens=[1] * (LIMITS.context_length - 2))
    assert session.commit([5]).finish is NONE
    assert session.commit([5, 6]).finish is LENGTH
    assert session.tree.committed_length == LIMITS.context_length


def test_a_resumed_generation_counts_what_it_has() -> None:
    """Tokens after the prompt are output: they count for max_tokens."""
    session = make_session(tokens=[1, 2, 3, 4], prompt_length=2, sampling=SamplingParams(max_tokens=3))
    assert session.row(None).generated == 2
    assert session.commit([5, 6]).tokens == [5]


def test_a_row_knows_its_place() -> None:
    """Position and generated count include the path; its tokens are history where that matters."""
    for sampling, path in ((SamplingParams(), None), (SamplingParams(presence_penalty=1.0), (4, 5))):
        session = make_session(sampling=sampling)
        session.propose(chain_block(0, 3, [4, 5]), arrived=0.0)
        row = session.row(session.tree.children[4].children[5])
        assert (row.position, row.generated) == (5, 2)
        assert getattr(row.history, "tokens", None) == path


def test_hit_means_that_the_bonus_was_in_the_tree() -> None:
    """Whether it was verified or not."""
    session = make_session()
    session.propose(chain_block(0, 3, [5, 6]), arrived=0.0)
    assert session.commit([5, 6]).hit
    assert not session.commit([7]).hit


def test_tokens_outside_the_vocabulary_are_dropped_with_what_hangs_below() -> None:
    """They are counted as stale; their siblings stay."""
    session = make_session()
    dropped = session.propose(block(0, [(-3, 2**31, 0.9), (0, 1, 0.9), (-3, 5, 0.5)]), arrived=0.0)
    assert dropped == 2
    assert [node.token for node in session.tree.nodes()] == [5]


@pytest.mark.parametrize(
    "nodes",
    [
        [(-9, 1, 0.5)],
        [(77, 1, 0.5)],
        [(-(2**62), 1, 0.5), (0, 1, 0.5)],
        [(0, 1, 0.5)],
        [(-2, 9, 0.5), (0, 4, 0.5)],
    ],
)
def test_absurd_parents_are_dropped_in_silence(nodes: list[tuple[int, int, float]]) -> None:
    """Future positions, unknown ids, oneself, or a contradiction of committed tokens."""
    session = make_session()
    assert session.propose(block(0, nodes), arrived=0.0) == len(nodes)
    assert len(session.tree) == 0


def test_the_tree_is_bounded() -> None:
    """Further nodes are dropped when it is full."""
    session = make_session()
    session.propose(block(0, [(-3, 1, 0.9), *((i, 1, 0.9) for i in range(99))]), arrived=0.0)
    assert len(session.tree) == LIMITS.max_tree_nodes


def learn_turnaround(session) -> float:
    """Ten verdicts, one every 40 ms, answered rightly after 10 ms; returns the time of the last verdict."""
    now, first_id = 0.0, 0
    for _ in range(10):
        step(session, [5, 5, 5])
        now += 0.04
        session.published(now, 0.0)
        base = session.tree.committed_length
        session.propose(chain_block(first_id, base, [5, 5, 5]), arrived=now + 0.01)
        first_id += 3
    return now


def test_after_a_miss_a_block_is_due_until_it_comes_or_is_late() -> None:
    """After the usual time, counted from the verdict; a ready block ends it."""
    session = make_session()
    now = learn_turnaround(session) + 0.04
    step(session, [7])
    session.published(now, 0.0)
    assert session.block_due(now) == pytest.approx(0.01, rel=0.1)
    assert session.gain(price=0.0) > 2.0
    assert session.block_due(now + 0.03) is None
    session.propose(chain_block(1000, session.tree.committed_length, [5]), arrived=now + 0.009)
    assert session.block_due(now + 0.009) is None


def test_after_a_hit_little_is_to_be_gained() -> None:
    """What is left of the tree is as good as what would come."""
    session = make_session()
    now = learn_turnaround(session) + 0.04
    session.propose(chain_block(900, session.tree.committed_length, [5] * 8, 0.99), arrived=now)
    step(session, [5, 5])
    session.published(now, 0.0)
    assert session.gain(price=0.0) == 0.0


def test_a_late_block_does_not_count_as_ready() -> None:
    """A ready block that does not know of the last verdict, and whose nodes are all gone."""
    session = make_session(policy=VerifyPolicy.SEQUENTIAL)
    step(session, [5])
    session.published(1.0, 0.0)
    session.propose(chain_block(0, 3, [6]), arrived=1.0)
    assert not session.may_start(1.1)
    session.propose(block(7, [], ready=True, base=4), arrived=1.1)
    assert session.may_start(1.1)


def test_waits_in_vain_are_remembered() -> None:
    """After one step without the block that was due, none is expected until one comes."""
    session = make_session()
    now = learn_turnaround(session) + 0.04
    step(session, [7])
    session.published(now, 0.0)
    session.started(now + 0.03)
    step(session, [7])
    session.published(now + 0.04, 0.0)
    assert session.block_due(now + 0.04) is None
    session.propose(chain_block(1000, session.tree.committed_length, [5]), arrived=now + 0.05)
    session.ready = False
    assert session.block_due(now + 0.05) is not None


def test_sequential_waits_in_vain_halve() -> None:
    """A draft that has gone silent costs a sequential session a few waits."""
    session = make_session(policy=VerifyPolicy.SEQUENTIAL)
    now, waits = 0.0, []
    for _ in range(4):
        step(session, [7])
        session.published(now, 0.0)
        waits.append(session.deadline - now)
        now = session.deadline
        session.started(now)
    assert waits == pytest.approx([2.0, 1.0, 0.5, 0.25])


def test_a_draft_that_is_not_wanted_is_not_at_work() -> None:
    """The verdict that says so stops it: the next step need not leave it its core."""
    session = make_session()
    session.propose(chain_block(1, 3, [5]), arrived=0.0)
    assert session.has_draft
    session.draft_wanted = False
    assert not session.has_draft
