"""What to expand next, and when to say ready."""

from __future__ import annotations

import pytest

from draft_service.scheduler import choose, divide, is_ready, share_of, should_send, to_suspend
from outrider.protocol.messages import FinishReason
from tests.unit.draft_service.fakes import proposal, session, verdict


def grown(key, *children, **changes):
    """A session with an expanded root that has told the verify side so."""
    held = session(key, **changes)
    held.grow(held.take(), proposal(*children))
    held.next_block(ready=False, now=0.0)
    held.starved = False
    return held


def test_the_best_nodes_over_all_sessions_are_chosen():
    """Reach decides, not the session."""
    one, two = grown(1, (10, 60), (11, 30)), grown(2, (20, 50), (21, 40))
    assert [choice.node.token for choice in choose([one, two], 3)] == [10, 20, 21]


def test_a_session_without_candidates_at_the_verify_side_goes_first():
    """After a miss the root of that session beats better nodes elsewhere."""
    rich, poor = grown(1, (10, 99), (11, 90)), session(2)
    poor.commit(verdict(3, 7), now=0.0)
    first = choose([rich, poor], 1)[0]
    assert (first.session, first.node) == (poor, None)


def test_sessions_with_nothing_to_expand_are_left_out():
    """Choosing more than there is gives what there is."""
    held = grown(1, (10, 60))
    assert len(choose([held, session(2, max_depth=0)], 8)) == 1
    assert choose([held], 8) == []


def test_half_of_the_room_is_for_the_shortest():
    """The rest is given in order, and none is left over while something is missing."""
    assert divide({1: 100, 2: 1, 3: 3}, 16) == {1: 12, 2: 1, 3: 3}
    assert divide({1: 100, 2: 50}, 16) == {1: 8, 2: 8}
    assert divide({1: 2, 2: 0}, 16) == {1: 2, 2: 0}
    assert divide({}, 16) == {}


def test_a_tree_that_cannot_grow_is_ready():
    """Nobody may wait for what does not come."""
    assert is_ready(session(max_depth=0), 8, step_seconds=0.001)


def test_ready_when_a_draft_step_costs_more_tokens_than_it_brings():
    """The marginal tokens of one more step are weighed against the session's own pace."""
    held = session()
    held.commit(verdict(3, 7), now=0.0)  # 1 token in 10 ms: 100 tokens per second
    held.grow(held.take(), proposal((10, 80)))  # worth 0.8 * 0.5 = 0.4 tokens, half of it now
    assert not is_ready(held, 8, step_seconds=0.001)
    assert is_ready(held, 8, step_seconds=0.003)


def test_a_sequential_session_is_never_ready_before_its_prompt_is_drafted():
    """It would stop there, and start no draft ever after."""
    assert not is_ready(session(pipelined=False), 8, step_seconds=1.0)
    fast = session()
    fast.commit(verdict(3, 7), now=0.0)
    assert is_ready(fast, 8, step_seconds=1.0)


def test_growing_sessions_share_a_step():
    """What one session can expect of a step gets less with every other that grows."""
    assert share_of([], 8) == 8
    assert share_of([session(1), session(2), session(3, max_depth=0)], 8) == 4
    assert share_of([session(i) for i in range(20)], 8) == 1


def test_memory_is_taken_from_finished_sessions_then_from_the_newest():
    """Older work goes on."""
    old, new, done = session(1), session(3), session(2)
    assert to_suspend([old, new]) is new
    done.commit(verdict(3, 9, finish_reason=FinishReason.LENGTH), now=0.0)
    assert to_suspend([old, new, done]) is done


def waiting(batch_size=1, **changes):
    """A pipelined session whose verify side has nodes and whose new ones wait for a block."""
    held = grown(1, (10, 60))
    held.next_block(False, now=0.0)
    held.commit(verdict(3, 10, batch_size=batch_size, **changes), now=0.0)
    held.grow(held.take(), proposal((11, 60)))
    held.starved = False
    return held


def test_an_answer_to_a_miss_goes_out_at_once():
    """The verify side has nothing to verify but this."""
    held = waiting()
    held.starved = True
    assert should_send(held, ready=True, now=0.0)


def test_nodes_wait_for_company_while_the_step_runs():
    """They are of no use before it ends, and every block takes time from it."""
    held = waiting()
    assert not should_send(held, ready=True, now=0.001)
    assert should_send(held, ready=False, now=0.002)
    held.next_block(False, now=0.002)
    held.grow(held.take(), proposal((12, 60)))
    assert not should_send(held, ready=False, now=0.003)
    assert should_send(held, ready=False, now=0.004)


def test_the_more_sessions_share_a_step_the_later_their_blocks_go_out():
    """A session that the target has nothing to verify of does not wait so."""
    held = waiting(batch_size=16)
    assert not should_send(held, ready=True, now=0.0235)
    assert should_send(held, ready=True, now=0.0245)


def test_a_session_whose_draft_is_not_wanted_pauses():
    """Neither is anything expanded for it nor sent, until a verdict wants it again."""
    held = waiting(draft_wanted=False)
    assert held.best_reach == 0.0
    assert not should_send(held, ready=True, now=1.0)
    held.commit(verdict(4, 11, step=2), now=1.0)
    assert held.best_reach > 0.0


@pytest.mark.parametrize("ready", [True, False])
def test_what_cannot_grow_does_not_wait(ready):
    """Nothing more will come to go with it, whether ready was said before or not: the engine sleeps now."""
    held = waiting()
    while held.best_reach:
        held.take()
    assert should_send(held, ready=ready, now=0.0)
