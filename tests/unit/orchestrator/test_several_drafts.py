"""A session with several drafts: what goes to whom, whose turn it is, and what the loss of one changes."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.events import (
    Action,
    BlockArrived,
    ConnectDraft,
    DraftFailed,
    DraftOpened,
    DropDraft,
    ParkDraft,
    SendBlock,
    SendVerdict,
    VerifyFailed,
    VerifyOpened,
)
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.session import PARK_SECONDS, STALL_VERDICTS, Session, SessionLimits
from orchestrator.streams import DraftStream, all_ready
from outrider.protocol.allowance import BLOCKS
from outrider.protocol.errors import NoReplica, Unavailable
from outrider.protocol.messages import Mode, Opened, SamplingParams, TokenBlock
from outrider.speculation.candidate_tree import draft_of, first_id_of
from tests.unit.orchestrator.test_session import SERVED, kinds, verdict

GONE = Unavailable("gone")
FIRST, SECOND = 2, 3
"""Streams of the drafts; the verify stream is 1."""


def started(mode: Mode = Mode.AUTO, drafts: int = 2) -> Session:
    """A session whose streams are open and whose first token is committed."""
    sampling = SamplingParams(max_tokens=50)
    request = ResolvedRequest(request_id="r", served=SERVED, prompt=(1, 2, 3), mode=mode, sampling=sampling)
    limits = SessionLimits(recovery_seconds=10.0, stall_seconds=2.0, drafts=drafts)
    machine = Session(request, 0, limits)
    machine.start(0.0)
    machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
    for stream in range(FIRST, FIRST + drafts):
        machine.handle_event(DraftOpened(stream, Opened("d", "i"), f"draft:{stream}"), 0.0)
    machine.handle_event(verdict(3, 10), 0.0)
    return machine


def block(stream: int, number: int = 0, token: int = 11, **fields: Any) -> BlockArrived:
    """A node below the last committed token, with an id of that draft."""
    first = first_id_of(stream - FIRST) + number
    given = {"parents": (-4,), "base_length": 4} | fields
    return BlockArrived(stream, TokenBlock(first, tokens=(token,), acceptances=(0.5,), **given))


def sent(actions: list[Action]) -> list[TokenBlock]:
    """The blocks that go to the verify replica."""
    return [action.block for action in actions if isinstance(action, SendBlock)]


def test_as_many_drafts_are_opened_as_are_wanted() -> None:
    """Each with node ids of its own."""
    machine = Session(started().request, 0, SessionLimits(recovery_seconds=1.0, stall_seconds=1.0, drafts=3))
    machine.start(0.0)
    actions = machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
    openings = [action.opening for action in actions if isinstance(action, ConnectDraft)]
    assert [draft_of(opening.first_node_id) for opening in openings] == [0, 1, 2]


def test_blocks_of_all_go_on() -> None:
    """And the verdict is sent once, for all of them."""
    machine = started()
    assert [len(sent(machine.handle_event(block(stream), 0.1))) for stream in (FIRST, SECOND)] == [1, 1]
    assert kinds(machine.handle_event(verdict(4, 11), 0.2)).count(SendVerdict) == 1


def test_the_targets_turn_has_come_when_the_last_is_ready() -> None:
    """The mark of the others is taken off; a verdict begins a new round."""
    machine = started()
    for base in (4, 5):
        fields = {"ready": True, "base_length": base, "parents": (-base,)}
        for stream, ready in ((FIRST, False), (SECOND, True)):
            arrived = block(stream, base)
            changed = TokenBlock(arrived.block.first_id, tokens=(11,), acceptances=(0.5,), **fields)
            (forwarded,) = sent(machine.handle_event(BlockArrived(stream, changed), 0.1))
            assert forwarded.ready is ready
        machine.handle_event(verdict(base, 20), 0.2)


def test_nobody_waits_for_a_draft_that_may_be_silent() -> None:
    """As a lookup is."""
    machine = started(drafts=1)
    machine.limits = SessionLimits(recovery_seconds=1.0, stall_seconds=1.0, drafts=2)
    machine.handle_event(verdict(4, 11), 0.1)
    machine.handle_event(DraftOpened(SECOND, Opened("d", "i"), "draft:3", may_be_silent=True), 0.1)
    (forwarded,) = sent(machine.handle_event(block(FIRST, token=12, ready=True), 0.2)) or [None]
    assert forwarded is None or forwarded.ready


def test_sequential_blocks_wait_for_all_drafts() -> None:
    """Then all go on together, the last one marked."""
    machine = started(Mode.SEQUENTIAL)
    assert not sent(machine.handle_event(block(FIRST, ready=True), 0.1))
    assert not sent(machine.handle_event(block(SECOND, token=12), 0.1))
    found = sent(machine.handle_event(block(SECOND, 1, token=13, ready=True), 0.1))
    assert [one.ready for one in found] == [False, False, True]


@pytest.mark.parametrize("base", [0, 3])
def test_a_mark_from_before_the_last_verdict_ends_no_wait(base: int) -> None:
    """The verify replica takes it for none: passed on in place of another draft's, it would stop the session.
    The loss of the draft that sent it ends the wait."""
    machine = started(Mode.SEQUENTIAL)
    assert not sent(machine.handle_event(block(FIRST, ready=True), 0.1))
    found = sent(machine.handle_event(block(SECOND, token=12, ready=True, base_length=base), 0.1))
    assert not any(one.ready and one.base_length == 4 for one in found)
    (mark,) = sent(machine.handle_event(DraftFailed(SECOND, GONE, "draft:3"), 0.2))
    assert (mark.ready, mark.base_length, mark.tokens) == (True, 4, ())


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.SEQUENTIAL])
def test_a_draft_that_let_its_turn_pass_is_not_waited_for(mode: Mode) -> None:
    """Until it says ready again."""
    machine = started(mode)
    machine.handle_event(block(FIRST, ready=True), 0.1)
    machine.handle_event(verdict(4, 20), 0.2)

    def last_of(stream: int, number: int, base: int) -> bool:
        node = TokenBlock(first_id_of(stream - FIRST) + number, (-base,), (11,), (0.5,), True, base)
        found = sent(machine.handle_event(BlockArrived(stream, node), 0.3))
        return bool(found) and found[-1].ready

    assert last_of(FIRST, 1, 5)
    assert last_of(SECOND, 1, 5)
    machine.handle_event(verdict(5, 21), 0.4)
    assert not last_of(FIRST, 2, 6)
    assert last_of(SECOND, 2, 6)


def test_the_loss_of_one_leaves_the_others() -> None:
    """Its blocks stay, the other's go on, and another draft is looked for."""
    machine = started()
    machine.handle_event(block(FIRST), 0.1)
    assert kinds(machine.handle_event(DraftFailed(FIRST, GONE, "draft:2"), 0.2)) == [DropDraft, ConnectDraft]
    assert machine.statistics.draft_losses == 1
    assert sent(machine.handle_event(block(SECOND, token=12), 0.3))
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.4)
    replayed = sent(machine.handle_event(VerifyOpened(5, Opened("w", "j"), "verify:2"), 0.5))
    assert sorted(token for one in replayed for token in one.tokens) == [11, 12]


def test_a_loss_ends_the_wait_of_a_sequential_session() -> None:
    """What the others sent goes on when they waited for the lost one alone."""
    machine = started(Mode.SEQUENTIAL)
    machine.handle_event(block(FIRST, ready=True), 0.1)
    found = sent(machine.handle_event(DraftFailed(SECOND, GONE, "draft:3"), 0.2))
    assert ([one.tokens for one in found], found[-1].ready) == ([(11,), ()], True)


def test_a_loss_does_not_end_a_wait_for_another() -> None:
    """The draft that is left has its turn."""
    machine = started(Mode.SEQUENTIAL)
    assert not sent(machine.handle_event(DraftFailed(SECOND, GONE, "draft:3"), 0.2))


def test_no_draft_takes_the_room_of_the_others() -> None:
    """Each has its share of what the verify replica takes between two verdicts."""
    machine = started()
    found = [sent(machine.handle_event(block(FIRST, number), 0.1)) for number in range(BLOCKS)]
    assert sum(map(len, found)) == BLOCKS // 2
    assert sent(machine.handle_event(block(SECOND), 0.1))


def test_a_draft_that_sent_its_share_still_says_that_it_is_ready() -> None:
    """Its further nodes stay behind; those of the others, which wait for its mark, go on."""
    machine = started(Mode.SEQUENTIAL)
    machine.handle_event(block(SECOND, token=12, ready=True), 0.1)
    for number in range(BLOCKS // 2):
        assert not sent(machine.handle_event(block(FIRST, number), 0.1))
    found = sent(machine.handle_event(block(FIRST, BLOCKS // 2, token=13, ready=True), 0.1))
    assert ([one.tokens for one in found], found[-1].ready) == ([(12,), *[(11,)] * (BLOCKS // 2), ()], True)


def test_a_draft_too_few_costs_nothing_but_looking_for_it() -> None:
    """The one that is there goes on, and the other is looked for again after a while."""
    machine = started()
    assert kinds(machine.handle_event(DraftFailed(SECOND, NoReplica("none"), ""), 0.1)) == [DropDraft]
    assert machine.statistics.draft_losses == 0
    assert ConnectDraft not in kinds(machine.handle_event(verdict(4, 11), 0.2))
    assert kinds(machine.handle_event(verdict(5, 12), 0.7)).count(ConnectDraft) == 1


def test_the_silent_one_of_two_is_given_up() -> None:
    """The other stays."""
    machine, dropped = started(), []
    for step in range(STALL_VERDICTS + 1):
        arrived = TokenBlock(first_id_of(0) + step, (-4 - step,), (11,), (0.5,), base_length=4 + step)
        machine.handle_event(BlockArrived(FIRST, arrived), 3.0 + step)
        dropped += [
            a for a in machine.handle_event(verdict(4 + step, 20), 3.0 + step) if type(a) is DropDraft
        ]
    assert [action.stream for action in dropped] == [SECOND]


def test_all_pause_and_are_ended_together() -> None:
    """When the verify replica has not wanted drafts for a while."""
    machine = started()
    machine.handle_event(verdict(4, 11, draft_wanted=False), 0.1)
    actions = machine.handle_event(verdict(5, 12, draft_wanted=False), 0.2 + PARK_SECONDS)
    assert [action.stream for action in actions if isinstance(action, ParkDraft)] == [FIRST, SECOND]


def test_a_draft_that_came_later_is_ended_later() -> None:
    """It took the place of a lost one after the last verdict that wanted drafts."""
    machine = started()
    machine.handle_event(verdict(4, 11, draft_wanted=False), 0.1)
    machine.handle_event(DraftFailed(SECOND, GONE, "draft:3"), 0.5)
    actions = machine.handle_event(verdict(5, 12, draft_wanted=False), 0.2 + PARK_SECONDS)
    assert [action.stream for action in actions if isinstance(action, ParkDraft)] == [FIRST]


@pytest.mark.parametrize(
    ("ready", "silent", "expected"),
    [
        ((True, True), (False, False), True),
        ((True, False), (False, False), False),
        ((True, False), (False, True), True),
        ((False, False), (True, True), False),
        ((), (), False),
    ],
)
def test_when_all_are_ready(ready: tuple[bool, ...], silent: tuple[bool, ...], expected: bool) -> None:
    """Nobody is, where there is nobody who could say so."""
    streams = [
        DraftStream(number, None, opened=True, ready=said, may_be_silent=may)  # type: ignore[arg-type]
        for number, (said, may) in enumerate(zip(ready, silent, strict=True))
    ]
    assert all_ready(streams) is expected
