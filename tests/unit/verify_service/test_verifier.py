"""Walking down the target's own choices, and the order in which nodes are laid out."""

from __future__ import annotations

from outrider.protocol.messages import Origin, SamplingParams, StepNodes
from outrider.speculation.candidate_tree import CandidateTree
from tests.unit.verify_service.fakes import FakeRunner, block, chain_block, greedy_text, make_session
from verify_service.scheduler import Work
from verify_service.speculation.origins import (
    FIRST_FORCED_ID,
    FIRST_LOOKUP_ID,
    FIRST_PREDICTED_ID,
    step_nodes,
)
from verify_service.verifier import Verifier, most_likely_path_first, walk


def tree_of(*nodes: tuple[int, int, float]):
    """A tree of (parent, token, acceptance)."""
    session = make_session()
    session.propose(block(0, nodes), arrived=0.0)
    return session.tree


def test_the_most_likely_path_lies_first() -> None:
    """Depth first, better children first, so that keeping the best path moves nothing."""
    tree = tree_of((-3, 1, 0.6), (-3, 2, 0.9), (1, 3, 0.5), (1, 4, 0.9), (3, 5, 0.9))
    ordered = most_likely_path_first(list(tree.nodes()))
    assert [node.id for node in ordered] == [1, 3, 4, 2, 0]


def test_the_walk_follows_the_targets_choices_through_verified_nodes() -> None:
    """It ends at the first choice that is no verified node."""
    tree = tree_of((-3, 1, 0.6), (-3, 2, 0.9), (1, 3, 0.5), (2, 4, 0.9))
    nodes = [node for node in tree.nodes() if node.id != 3]
    row = {node.id: index for index, node in enumerate(nodes, 1)}
    chosen = [0] * (len(nodes) + 1)
    assert walk(tree.children, nodes, chosen) == [0]
    chosen[0] = 2
    chosen[row[1]] = 3
    chosen[row[2]] = 4
    assert walk(tree.children, nodes, chosen) == [0, row[1], row[2]]


def test_a_step_commits_accepted_nodes_and_bonus() -> None:
    """The kept path's keys stay, the bonus token is left to compute, and all else is forgotten."""
    runner, session = FakeRunner(), make_session()
    truth = greedy_text([1, 2, 3], 4)
    wrong = (truth[2] + 1) % 13
    session.propose(chain_block(0, 3, [truth[0], truth[1], wrong]), arrived=0.0)
    nodes = list(session.tree.nodes())
    outcome = Verifier(runner, ()).run([Work(session, 1, True, nodes)]).outcomes[0]
    assert outcome.tokens == truth[:3]
    assert (outcome.accepted, outcome.depth, outcome.hit) == (2, 3, False)
    assert session.kv.tokens == [1, 2, 3, *truth[:2]]
    assert (session.kv.scratch, session.uncomputed) == (0, 1)


def test_a_chunk_of_a_prompt_commits_no_new_token() -> None:
    """It only moves the computed length."""
    runner, session = FakeRunner(), make_session(tokens=[1, 2, 3, 4, 5], computed=0)
    result = Verifier(runner, ()).run([Work(session, 3, completes=False)])
    assert (result.outcomes, result.tokens) == ([], 3)
    assert session.kv.tokens == [1, 2, 3]
    assert session.uncomputed == 2


def test_the_nodes_of_a_step_are_told_as_a_tree() -> None:
    """Each with its parent's index and with who proposed it first; at most as many as fit a message."""
    tree = tree_of((-3, 1, 0.6), (-3, 2, 0.9), (1, 3, 0.5))
    parent = tree.children[2]
    tree.add_child(FIRST_LOOKUP_ID, parent, 7, 0.4)
    tree.add_child(FIRST_FORCED_ID, parent, 8, 0.3)
    tree.add_child(FIRST_PREDICTED_ID, parent, 9, 0.2)
    told = step_nodes(most_likely_path_first(list(tree.nodes())))
    assert (told.tokens, told.parents) == ((2, 3, 7, 8, 9, 1), (-1, 0, 0, 0, 0, -1))
    verify_side = (Origin.LOOKUP, Origin.GRAMMAR, Origin.PREDICTION)
    assert told.origins == (Origin.DRAFT, Origin.DRAFT, *verify_side, Origin.DRAFT)
    wide = CandidateTree([1, 2, 3], max_nodes=512)
    wide.add(block(0, [(-3, token, 0.5) for token in range(300)]))
    assert len(step_nodes(most_likely_path_first(list(wide.nodes()))).tokens) == 256


def test_nodes_are_told_to_those_who_asked() -> None:
    """As they were before the commit, which re-roots the tree: a text may end at a verified node."""
    truth = greedy_text([1, 2, 3], 4)
    for asked in (False, True):
        session = make_session(sampling=SamplingParams(max_tokens=2), record_steps=asked)
        session.propose(chain_block(0, 3, truth[:3]), arrived=0.0)
        work = Work(session, 1, True, list(session.tree.nodes()))
        outcome = Verifier(FakeRunner(), ()).run([work]).outcomes[0]
        chain = StepNodes(tuple(truth[:3]), (-1, 0, 1), (Origin.DRAFT,) * 3)
        assert outcome.recorded == (chain if asked else None)
        assert outcome.tokens == truth[:2]
