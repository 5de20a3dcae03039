"""The state machine of one continuation meets replicas that send too much, or the same again."""

from __future__ import annotations

import pytest

from orchestrator.events import (
    BlockArrived,
    ConnectDraft,
    ConnectVerify,
    DraftFailed,
    DraftOpened,
    DropDraft,
    DropVerify,
    SendBlock,
    VerdictArrived,
    VerifyFailed,
    VerifyOpened,
)
from outrider.protocol.allowance import BLOCKS, LATE
from outrider.protocol.errors import Flood, MismatchedPair
from outrider.protocol.messages import Mode, Opened, TokenBlock, Verdict
from tests.unit.orchestrator import test_several_drafts as several
from tests.unit.orchestrator.test_session import GONE, block, kinds, only, started, verdict


def test_a_second_opening_is_a_fault() -> None:
    """Of either replica: it costs the draft its place, and the session looks for another verify replica."""
    machine = started()
    assert kinds(machine.handle_event(DraftOpened(2, Opened("d", "i"), "draft:1"), 0.1)) == [
        DropDraft,
        ConnectDraft,
    ]
    assert kinds(machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.1)) == [
        DropVerify,
        ConnectVerify,
    ]


def test_a_draft_that_floods_is_dropped() -> None:
    """One block more than there is room for between two verdicts; a verdict makes room for as many again."""
    machine = started()
    machine.handle_event(verdict(4, 11), 0.1)
    ids = iter(range(1000))
    for _ in range(3 * BLOCKS):
        assert kinds(machine.handle_event(block(next(ids), (-5,), (11,)), 0.1)) == [SendBlock]
    actions = machine.handle_event(block(next(ids), (-5,), (11,)), 0.1)
    assert kinds(actions) == [DropDraft, ConnectDraft]
    assert type(only(actions, DropDraft).error) is Flood


def test_a_draft_that_floods_again_and_again_is_tried_ever_later() -> None:
    """Its good blocks before do not make it a sound one; a verdict after one does."""
    machine = started()
    for stream, follows in ((2, [DropDraft, ConnectDraft]), (3, [DropDraft])):
        first = (stream - 2) << 40
        machine.handle_event(BlockArrived(stream, TokenBlock(first, (-4,), (11,), (0.5,))), 0.1)
        assert kinds(machine.handle_event(DraftFailed(stream, GONE, "draft:1"), 0.1)) == follows


def test_no_more_is_forwarded_than_the_verify_replica_takes() -> None:
    """Several drafts in turn may send more between two verdicts; what is too much stays here."""
    machine = started()
    sent = 0
    for stream in range(2, 40):
        first = (stream - 2) << 40
        for number in range(BLOCKS):
            arrived = BlockArrived(stream, TokenBlock(first + number, (-4,), (11,), (0.5,)))
            sent += len(machine.handle_event(arrived, 99.0))
        machine.handle_event(DraftFailed(stream, MismatchedPair("other"), "draft:1"), 1000.0 * stream)
        machine._draft_losses.retry_at = 0.0
        machine._draft_losses.count = 0
        if not machine._drafts:
            machine._connect_draft(99.0)
    assert sent == LATE * BLOCKS


@pytest.mark.parametrize(
    ("dead", "forwarded"),
    [
        (block(0, (-1,), (9,)), 0),
        (block(0, (-1, 0, 1), (9, 3, 10), base_length=3), 0),
        (block(0, (-2, -1), (9, 9), ready=True, base_length=3), 0),
        (block(0, (-1, 0), (9, 3), ready=True, base_length=4), 1),
        (block(0, (-2,), (3,)), 1),
        (block(0, (-2, -4), (9, 11)), 1),
    ],
)
def test_dead_blocks_stay_here(dead: BlockArrived, forwarded: int) -> None:
    """One whose nodes all contradict what is committed brings nothing, unless it says ready in time; one with
    a node that is committed or alive goes on as it is."""
    machine = started()
    sent = machine.handle_event(dead, 0.1)
    assert len(sent) == forwarded


@pytest.mark.parametrize(
    "impossible",
    [
        verdict(4, *range(10, 60)),
        verdict(4, *range(10, 59)),
        VerdictArrived(1, Verdict(1, 4, (11,))),
    ],
)
def test_a_verify_replica_that_never_ends_is_lost(impossible: VerdictArrived) -> None:
    """Verdicts beyond the most tokens, up to them without an end, and of a step that was done."""
    assert kinds(started().handle_event(impossible, 0.1)) == [DropVerify, ConnectVerify]


def test_blocks_that_were_never_ready_do_not_take_the_room_of_one_that_is() -> None:
    """A sequential session holds a bounded number of them, and drops the oldest."""
    machine = several.started(Mode.SEQUENTIAL, drafts=1)
    for base in range(4, 20):
        for number in range(BLOCKS):
            arrived = several.block(several.FIRST, BLOCKS * base + number, base_length=base, parents=(-base,))
            assert not machine.handle_event(arrived, 0.1)
        machine.handle_event(verdict(base, 20), 0.1)
    ready = several.block(several.FIRST, 1000, base_length=20, parents=(-20,), ready=True)
    *_, last = several.sent(machine.handle_event(ready, 0.1))
    assert (last.ready, last.base_length) == (True, 20)


def test_a_new_verify_replica_is_told_whose_turn_it_is_however_many_blocks_are_alive() -> None:
    """A draft's nodes are alive in more pieces than it takes: the last of those that it gets says ready."""
    machine = started(Mode.SEQUENTIAL)
    pieces = 2 * LATE * BLOCKS
    parents = [-4, *(node for token in range(pieces) for node in (-4, 0))]  # every second one is below 0
    machine.handle_event(block(0, tuple(parents), tuple(range(11, 12 + 2 * pieces))), 0.1)
    machine.handle_event(verdict(4, 11), 0.1)
    machine.handle_event(block(len(parents), (), (), ready=True, base_length=5), 0.1)
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.1)
    blocks = [each.block for each in machine.handle_event(VerifyOpened(3, Opened("v", "i"), "verify:2"), 0.1)]
    assert [each.ready for each in blocks] == [False] * (LATE * BLOCKS - 1) + [True]
