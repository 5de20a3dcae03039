"""When nodes go out."""

from __future__ import annotations

import pytest

from draft_service.posting import Posting
from draft_service.scheduler import should_send
from outrider.allowance import BLOCKS
from tests.unit.draft_service.fakes import proposal, session, verdict


def test_before_the_first_verdict_nothing_waits():
    """No round is known that a node could be early for."""
    assert Posting().due(0.0)


def test_nodes_drafted_ahead_go_out_before_the_step_ends():
    """A single session's every 1.5 of ten milliseconds."""
    posting = Posting()
    posting.verdict(now=1.0, period=0.010, batch_size=1)
    assert not posting.due(1.0014)
    assert posting.due(1.0016)
    posting.sent(1.0016)
    assert not posting.due(1.003)
    assert posting.due(1.0032)


@pytest.mark.parametrize(("batch_size", "first"), [(2, 0.003), (3, 0.0045), (4, 0.006), (8, 0.006)])
def test_with_others_the_first_nodes_wait_longer(batch_size, first):
    """The step is longer and has more to receive; six tenths into the round it is time for everybody."""
    posting = Posting()
    posting.verdict(now=1.0, period=0.010, batch_size=batch_size)
    assert not posting.due(0.9999 + first)
    assert posting.due(1.0001 + first)


def test_an_early_answer_does_not_put_the_others_off():
    """The block that says ready goes out at once; those drafted ahead keep their time."""
    posting = Posting()
    posting.verdict(now=1.0, period=0.010, batch_size=1)
    posting.sent(1.0)
    assert posting.due(1.0016)


def test_many_sessions_send_one_block_each():
    """With thirty sessions in a step of 40 ms the second would come after the verdict."""
    posting = Posting()
    posting.verdict(now=1.0, period=0.040, batch_size=30)
    posting.sent(1.025)
    assert not posting.due(1.040)


def test_in_a_large_batch_even_the_answer_waits():
    """Thirty sessions in a step of 40 ms: the target does not wait for any of them."""
    held = drafting()
    held.posting.verdict(now=1.0, period=0.040, batch_size=30)
    assert not should_send(held, ready=True, now=1.001)
    assert should_send(held, ready=True, now=1.025)
    held.take()  # nothing more is to come
    assert should_send(held, ready=True, now=1.001)


def drafting():
    """A session in a round of ten milliseconds that began at 1.0, with a node to send and more to come."""
    held = session()
    held.commit(verdict(3, 7, step=1), now=0.990)
    held.commit(verdict(4, 8, step=2), now=1.0)
    held.grow(held.take(), proposal((10, 80)))
    return held


def test_nodes_wait_while_more_are_to_come():
    """What says ready goes at once, what is drafted ahead when it is due."""
    held = drafting()
    assert should_send(held, ready=True, now=1.001)
    assert not should_send(held, ready=False, now=1.001)
    assert should_send(held, ready=False, now=1.007)


def test_nodes_do_not_wait_for_nothing():
    """When nothing more is to be drafted, what there is goes out."""
    held = drafting()
    held.take()
    assert should_send(held, ready=False, now=1.001)


def test_blocks_of_a_round_are_bounded():
    """The last one of those there is room for is kept for the block that says ready."""
    held = drafting()
    for number in range(BLOCKS - 1):
        assert should_send(held, ready=False, now=2.0 + number)
        held.next_block(ready=False, now=2.0 + number)
        held.grow(None, proposal((20 + number, 80)))
    assert not should_send(held, ready=False, now=90.0)
    assert should_send(held, ready=True, now=90.0)
    held.commit(verdict(5, 9, step=3), now=91.0)
    held.grow(None, proposal((90, 80)))
    assert should_send(held, ready=False, now=1000.0)


def test_nothing_new_is_not_sent():
    """A block without nodes only says ready."""
    held = drafting()
    held.next_block(ready=True, now=1.001)
    assert not should_send(held, ready=False, now=1.009)
