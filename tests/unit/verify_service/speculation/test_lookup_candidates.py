"""Candidates from the text itself: where they hang, and what is learned from them."""

from __future__ import annotations

import pytest

from outrider.speculation.acceptance import AcceptanceModel, lookup_bucket, lookup_priors
from outrider.speculation.candidate_tree import CandidateTree
from outrider.speculation.lookup import GradualLookup
from tests.unit.verify_service.fakes import chain_block
from verify_service.speculation.lookup_candidates import LookupCandidates
from verify_service.speculation.origins import FIRST_LOOKUP_ID

TEXT = [1, 2, 3, 4, 5, 6, 1, 2, 3]


@pytest.fixture
def acceptance() -> AcceptanceModel:
    """Nothing learned yet."""
    return AcceptanceModel(lookup_priors())


def test_what_followed_before_is_proposed(acceptance: AcceptanceModel) -> None:
    """A chain below the last committed token, with ids of its own and the estimate for its match length."""
    tree = CandidateTree(TEXT, 64)
    LookupCandidates(GradualLookup(TEXT), acceptance, "").propose(tree)
    best = next(tree.nodes())
    assert (best.token, best.depth) == (4, 1)
    assert all(node.id >= FIRST_LOOKUP_ID for node in tree.nodes())
    assert best.acceptance == acceptance.estimate(lookup_bucket(3), 0)


def test_matches_that_turn_out_right_are_trusted_more(acceptance: AcceptanceModel) -> None:
    """And wrong ones less, whether they were verified or not."""
    for token, better in ((4, True), (9, False)):
        tree, lookup = CandidateTree(TEXT, 64), LookupCandidates(GradualLookup(TEXT), acceptance, "code")
        lookup.propose(tree)
        before = acceptance.estimate(lookup_bucket(3), 0, "code")
        lookup.learn(tree, [token])
        assert (acceptance.estimate(lookup_bucket(3), 0, "code") > before) is better


def test_a_draft_that_agrees_raises_the_estimate(acceptance: AcceptanceModel) -> None:
    """A node proposed by both is as likely as the better estimate says, and so is what hangs below."""
    tree = CandidateTree(TEXT, 64)
    LookupCandidates(GradualLookup(TEXT), acceptance, "").propose(tree)
    first, second = (node.reach for node in list(tree.nodes())[:2])
    tree.add(chain_block(0, len(TEXT), [4], acceptance=0.99))
    nodes = list(tree.nodes())
    assert nodes[0].reach == 0.99
    assert nodes[1].reach == pytest.approx(second * 0.99 / first)


def test_a_full_tree_is_left_alone(acceptance: AcceptanceModel) -> None:
    """What finds no place has no children either."""
    tree = CandidateTree(TEXT, 2)
    LookupCandidates(GradualLookup(TEXT), acceptance, "").propose(tree)
    assert len(tree) == 2


def test_what_is_not_worth_its_price_is_not_proposed(acceptance: AcceptanceModel) -> None:
    """A chain ends where the walk hardly reaches it; nothing is left of one that begins there."""
    whole, cut, none = (CandidateTree(TEXT, 64) for _ in range(3))
    LookupCandidates(GradualLookup(TEXT), acceptance, "").propose(whole)
    second = list(whole.nodes())[1]
    LookupCandidates(GradualLookup(TEXT), acceptance, "").propose(cut, min_reach=second.reach)
    assert [node.token for node in cut.nodes()] == [4, 5]
    LookupCandidates(GradualLookup(TEXT), acceptance, "").propose(none, min_reach=0.99)
    assert len(none) == 0
