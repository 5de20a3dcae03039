"""One session: its tree, what is sent, what it learns."""

from __future__ import annotations

import pytest

from draft_service.drafters.base import Candidate, CandidateSource, Proposal
from draft_service.session import FULL_PRICE_SESSIONS
from outrider.protocol.messages import FinishReason, SamplingParams
from tests.unit.draft_service.fakes import FixedCalibration, proposal, request, session, verdict


def expand(held, *children, token=None):
    """Take the best node, which has this token, and give it children."""
    node = held.take()
    assert (node.token if node else None) == token
    held.grow(node, proposal(*children))
    return node


def test_the_root_is_expanded_first_and_its_children_are_named_after_it():
    """Children of the last committed token have minus the committed length as parent."""
    held = session(opening=request((5, 6, 7), first_node_id=100))
    expand(held, (10, 60), (11, 30))
    block = held.next_block(ready=False, now=0.0)
    assert (block.first_id, block.parents, block.tokens) == (100, (-3, -3), (10, 11))
    assert block.acceptances == (0.6, 0.3)
    assert block.base_length == 3


def test_nodes_are_expanded_by_reach():
    """The node that the target most likely gets to comes next, wherever it is in the tree."""
    held = session()
    expand(held, (10, 60), (11, 30))
    expand(held, (20, 90), token=10)
    expand(held, (30, 40), token=20)  # 0.54
    expand(held, token=11)  # 0.30
    expand(held, token=30)  # 0.216
    assert held.best_reach == 0.0


def test_unlikely_candidates_are_not_sent_until_a_commit_brings_them_nearer():
    """A child that was too unlikely becomes a node, without another expansion, when its parent is chosen."""
    held = session()
    expand(held, (10, 60), (11, 1))
    expand(held, token=10)
    expand(held, (20, 30), token=11)  # reach 0.003
    assert held.next_block(False, 0.0).tokens == (10, 11)
    held.commit(verdict(3, 11), now=0.0)
    assert held.next_block(False, 0.0).tokens == (20,)
    assert not held.root_pending
    assert held.starved, "the verify side had nothing below 11"


@pytest.mark.parametrize(
    ("batch_size", "sent"), [(1, (20, 21)), (FULL_PRICE_SESSIONS, (20,)), (2 * FULL_PRICE_SESSIONS, (20,))]
)
def test_in_batches_only_nodes_worth_their_price_are_drafted(batch_size, sent):
    """At a price of a fifth of a token; few sessions draft what may be worth it in a round to come."""
    held = session()
    expand(held, (10, 60))
    held.commit(verdict(3, 10, batch_size=batch_size, node_price=0.2), now=0.0)
    held.next_block(False, 0.0)
    expand(held, (20, 30), (21, 10))
    assert held.next_block(False, 0.0).tokens == sent


def test_a_hit_keeps_the_subtree_and_a_miss_starts_from_the_root():
    """Below a committed node everything lives on; a token that was no node leaves only the root."""
    held = session()
    expand(held, (10, 60), (11, 30))
    expand(held, (20, 90), token=10)
    held.next_block(False, 0.0)
    rerooted = held.commit(verdict(3, 10), now=0.0)
    assert [node.token for node in rerooted.dropped] == [11]
    assert (held.root_pending, held.starved) == (False, False)
    expand(held, (30, 50), token=20)
    held.commit(verdict(4, 20, 99, step=2), now=0.1)
    assert (held.root_pending, held.starved, len(held.tree)) == (True, True, 0)


def test_a_bonus_that_was_a_leaf_is_expanded_as_the_root():
    """The unexpanded node that became the last committed token is the next to expand."""
    held = session()
    expand(held, (10, 60))
    held.next_block(False, 0.0)
    held.commit(verdict(3, 10), now=0.0)
    assert held.root_pending


def test_nodes_that_all_died_before_they_were_sent_are_not_sent():
    """A miss empties what was still to send."""
    held = session()
    expand(held, (10, 60))
    held.commit(verdict(3, 99), now=0.0)
    assert not held.outbound.nodes


def test_nodes_that_were_committed_before_they_were_sent_still_lead_to_their_children():
    """The verify side has to hear of a committed node to place the children below it."""
    held = session(opening=request(first_node_id=7))
    expand(held, (10, 60))
    expand(held, (20, 90), token=10)
    held.commit(verdict(3, 10), now=0.0)
    block = held.next_block(False, 0.0)
    assert (block.first_id, block.parents, block.tokens) == (7, (-3, 7), (10, 20))


def test_bounds_on_nodes_depth_and_output_length_stop_the_growth():
    """Nothing is proposed beyond them, and then nothing is worth expanding."""
    deep = session(max_depth=1)
    expand(deep, (10, 90))
    assert deep.best_reach == 0.0
    full = session(max_nodes=2)
    expand(full, (10, 90), (11, 80), (12, 70))
    assert (len(full.tree), full.best_reach) == (2, 0.0)
    short = session(opening=request(sampling=SamplingParams(max_tokens=2)))
    expand(short, (10, 90))
    assert short.best_reach == 0.0, "the second token comes with the verification of the first"


def test_positions_past_the_draft_context_are_not_computed():
    """A sequence longer than the draft's context proposes nothing instead of failing."""
    held = session(context_length=3)
    expand(held, (10, 90))
    assert held.best_reach == 0.0
    assert session(context_length=2).best_reach == 0.0


def test_end_tokens_are_not_proposed():
    """Verifying them brings nothing: the parent's own choice ends the text."""
    held = session(end_tokens=frozenset({10}))
    expand(held, (10, 90), (11, 40))
    assert held.next_block(False, 0.0).tokens == (11,)


def test_a_recalled_chain_is_placed_and_expanded_parent_first():
    """A lookup's chain can be computed in one go, together with the root."""
    held = session()
    chain = [
        Candidate(10, CandidateSource.LOOKUP, 80, 0),
        Candidate(11, CandidateSource.LOOKUP, 80, 0, 0),
        Candidate(12, CandidateSource.LOOKUP, 80, 0, 1),
    ]
    held.grow(None, Proposal(chain))
    assert held.next_block(False, 0.0).parents == (-3, 0, 1)
    assert [held.take(), held.take().token, held.take().token, held.take().token] == [None, 10, 11, 12]


def test_verdicts_teach_the_calibration_which_child_was_taken():
    """Every position with ranked children is observed, also below the verified nodes."""
    calibration = FixedCalibration()
    held = session(calibration=calibration)
    node = held.take()
    held.grow(node, proposal((10, 60), (11, 1), winners=(10, 11)))
    expand(held, (20, 90), token=10)
    held.commit(verdict(3, 10, 21), now=0.0)
    assert calibration.observed == [([10, 11], 10), ([20], 21)]
    assert calibration.winners[0] == ((10, 11), 10)


def test_what_was_put_back_is_taken_again():
    """A prefill that goes on leaves the root, and what hangs below it, unexpanded."""
    held = session()
    held.grow(None, Proposal([Candidate(10, CandidateSource.LOOKUP, 80, 0)]))
    root, child = held.take(), held.take()
    held.put_back(root)
    held.put_back(child)
    assert held.take() is None
    assert held.take().token == 10


def test_forgotten_expansions_start_at_the_root_again():
    """After its memory was taken, a session expands root and nodes anew and sends nothing twice."""
    held = session()
    expand(held, (10, 60))
    expand(held, (20, 90), token=10)
    held.next_block(False, 0.0)
    held.forget_expansions()
    expand(held, (10, 60))
    expand(held, (20, 90), token=10)
    assert not held.outbound.nodes


def test_a_lookup_that_repeats_itself_is_learned_from_once():
    """It proposes the rest of the same passage at every commit."""
    calibration = FixedCalibration()
    held = session(calibration=calibration)
    held.grow(
        None,
        Proposal(
            [Candidate(10, CandidateSource.LOOKUP, 80, 0), Candidate(11, CandidateSource.LOOKUP, 80, 0, 0)]
        ),
    )
    held.commit(verdict(3, 10), now=0.0)
    held.grow(None, Proposal([Candidate(11, CandidateSource.LOOKUP, 80, 0)]))
    held.commit(verdict(4, 11, step=2), now=0.1)
    assert calibration.observed[-1] == ([11], 11)


def test_a_finished_session_grows_no_more():
    """The last verdict says so."""
    held = session()
    held.commit(verdict(3, 9, finish_reason=FinishReason.STOP), now=0.0)
    assert held.best_reach == 0.0


def test_a_sequential_session_stops_at_ready_until_the_next_verdict():
    """Drafting and verification take turns."""
    held = session(pipelined=False)
    expand(held, (10, 60))
    held.next_block(ready=True, now=0.0)
    assert held.best_reach == 0.0
    held.commit(verdict(3, 10), now=0.0)
    assert held.best_reach > 0.0


def test_a_pipelined_session_stops_at_ready_while_verdicts_say_so():
    """The target then has the draft's cores; later verdicts may say otherwise."""
    held = session()
    held.commit(verdict(3, 9, take_turns=True), now=0.0)
    expand(held, (10, 60))
    held.next_block(ready=True, now=0.0)
    assert held.best_reach == 0.0
    held.commit(verdict(4, 10, step=2), now=0.1)
    expand(held, (11, 60))
    held.next_block(ready=True, now=0.1)
    assert held.best_reach > 0.0
