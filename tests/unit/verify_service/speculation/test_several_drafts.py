"""What is believed of nodes that several drafts propose, and what is learned of their agreement."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.speculation.candidate_tree import CandidateTree, first_id_of
from tests.unit.verify_service.fakes import block, chain_block
from verify_service.speculation.origins import FIRST_LOOKUP_ID
from verify_service.speculation.several_drafts import MAX_SILENCE, Agreement, Belief

A, B = first_id_of(0), first_id_of(1)


class Session:
    """A tree, and the belief of two drafts' nodes."""

    def __init__(self, agreement: Agreement | None = None, drafts: Sequence[int] = (0, 1)) -> None:
        self.tree = CandidateTree([1], 64)
        self.belief = Belief(agreement or Agreement(), True, "")
        self._next = {A: A, B: B}
        for draft in drafts:
            self.belief.hear(draft, 0)

    def propose(self, first: int, token: int, acceptance: float) -> None:
        """A node for the next position."""
        number = self._next[first]
        self._next[first] += 1
        self.tree.add(chain_block(number, self.tree.committed_length, [token], acceptance))

    def commit(self, token: int) -> None:
        """The target chose a token."""
        self.belief.learn(self.tree, [token])
        self.tree.commit([token])

    def believed(self, token: int) -> float:
        """What is believed of a node for the next position."""
        return self.belief.estimator()(self.tree.children[token])


def test_equal_tokens_below_one_parent_are_one_node() -> None:
    """With the estimates of both; children of either name hang below it."""
    tree = CandidateTree([1], 64)
    tree.add(chain_block(A, 1, [5, 6], 0.5))
    tree.add(chain_block(B, 1, [5, 7], 0.8))
    (node,) = tree.children.values()
    assert (node.estimates, node.acceptance, sorted(node.children)) == ({0: 0.5, 1: 0.8}, 0.8, [6, 7])
    assert [child.estimates for child in node.children.values()] == [{0: 0.5}, {1: 0.8}]


def test_one_draft_that_says_a_thing_twice_agrees_with_nobody() -> None:
    """Its better estimate counts."""
    tree = CandidateTree([1], 64)
    tree.add(block(A, [(-1, 5, 0.5), (-1, 5, 0.7)]))
    assert tree.children[5].estimates == {0: 0.7}


def test_a_lone_drafts_estimates_are_believed_as_they_are() -> None:
    """But for what trust takes off."""
    session = Session(drafts=(0,))
    session.propose(A, 5, 0.6)
    assert session.believed(5) == pytest.approx(0.6)
    for _ in range(30):
        session.propose(A, 5, 0.9)
        session.commit(6)
    session.propose(A, 5, 0.6)
    assert session.believed(5) < 0.3


def test_agreement_is_learned() -> None:
    """Where two drafts are right together and wrong apart, agreement is worth more than their estimates."""
    agreement = Agreement()
    session = Session(agreement)
    for number in range(60):
        both, only = 5 + number % 3, 9
        session.propose(A, both, 0.5)
        session.propose(B, both, 0.5)
        session.propose(A, only, 0.5)
        session.commit(both)
    other = Session(agreement)
    other.propose(A, 5, 0.5)
    other.propose(B, 5, 0.5)
    other.propose(A, 9, 0.5)
    assert other.believed(5) > 0.8
    assert other.believed(9) < 0.2


def test_a_liar_does_not_spoil_what_honest_drafts_say() -> None:
    """Its own nodes are believed less and less; those of the other draft are not."""
    session = Session()
    for _ in range(60):
        session.propose(A, 5, 0.8)
        session.propose(B, 9, 0.99)
        session.commit(5)
    session.propose(A, 5, 0.8)
    session.propose(B, 9, 0.99)
    assert session.believed(5) > 0.75
    assert session.believed(9) < 0.2


def test_agreement_with_a_liar_lends_it_no_weight() -> None:
    """A node that both propose is believed as what the honest draft says of it, once the liar is known."""
    session = Session()
    for _ in range(60):
        session.propose(A, 5, 0.3)
        session.propose(B, 9, 0.99)
        session.commit(6)
    session.propose(A, 7, 0.3)
    session.propose(B, 7, 0.99)
    assert session.believed(7) < 0.5


def test_a_draft_that_has_gone_leaves_the_rules_of_one() -> None:
    """After some steps without its nodes."""
    session = Session()
    session.belief.hear(0, MAX_SILENCE)
    assert not session.belief.several


def test_what_is_proposed_here_keeps_its_own_estimate() -> None:
    """It is calibrated already, whether one draft or several are at work."""
    for drafts in ((0,), (0, 1)):
        session = Session(drafts=drafts)
        session.tree.add_child(FIRST_LOOKUP_ID, None, 5, 0.37)
        assert session.believed(5) == 0.37


def test_no_draft_fills_the_tree() -> None:
    """Half of it is the other's; what the first commits makes room again."""
    tree = CandidateTree([1], 8)
    tree.max_per_draft = 4
    flood = tree.add(block(A, [(-1, token, 0.9) for token in range(10)]))
    assert (len(flood.nodes), flood.stale) == (4, 6)
    assert len(tree.add(block(B, [(-1, token, 0.9) for token in range(20, 23)])).nodes) == 3
    tree.commit([0])
    assert len(tree) == 0
    assert len(tree.add(block(A + 10, [(-2, token, 0.9) for token in range(10)])).nodes) == 4
