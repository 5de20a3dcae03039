"""The tokens that a grammar forces are candidates, and sure."""

from __future__ import annotations

from outrider.speculation.candidate_tree import CandidateTree
from tests.grammars import choice, ids, matcher
from verify_service.speculation.forced_candidates import ForcedCandidates
from verify_service.speculation.origins import FIRST_FORCED_ID, from_draft


def test_the_chain_is_proposed_up_to_where_there_is_a_choice() -> None:
    """Below the last committed token, with ids of its own."""
    tree, text = CandidateTree([1, 2, 3], 64), ids("certainly yes")
    found = ForcedCandidates(matcher(choice("certainly yes", "certainly no")))
    found.propose(tree)
    nodes = sorted(tree.nodes(), key=lambda node: node.depth)
    assert [node.token for node in nodes] == text[: len(nodes)]
    assert 0 < len(nodes) < len(text)
    assert all(node.reach == 1.0 and found.found(node) and not from_draft(node) for node in nodes)
    assert nodes[0].id == FIRST_FORCED_ID


def test_a_node_that_is_there_becomes_sure() -> None:
    """A draft's proposal is used as it is, and counts as forced in this round."""
    tree, text = CandidateTree([1], 64), ids("yes indeed")
    drafted = tree.add_child(7, None, text[0], 0.2)
    state = matcher(choice("yes indeed"))
    found = ForcedCandidates(state)
    found.propose(tree)
    assert drafted.reach == 1.0
    assert found.found(drafted)
    assert drafted.children[text[1]].parent is drafted
    tree.commit(text[:1])
    state.advance(text[0])
    found.propose(tree)
    assert len(tree) == len(text) - 2


def test_a_full_tree_takes_no_more() -> None:
    """And a grammar with a choice proposes nothing."""
    tree = CandidateTree([1], 1)
    ForcedCandidates(matcher(choice("yes indeed"))).propose(tree)
    assert len(tree) == 1
    tree = CandidateTree([1], 64)
    ForcedCandidates(matcher(choice("yes", "no"))).propose(tree)
    assert len(tree) == 0
