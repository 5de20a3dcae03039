"""The state machine of one continuation, event by event, with time as a number."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.events import (
    Action,
    Announce,
    BlockArrived,
    ConnectDraft,
    ConnectVerify,
    DraftFailed,
    DraftOpened,
    DropDraft,
    DropVerify,
    Emit,
    Fail,
    Finish,
    ParkDraft,
    SendBlock,
    SendVerdict,
    VerdictArrived,
    VerifyFailed,
    VerifyOpened,
)
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.session import (
    MAX_INTERNAL_ERRORS,
    PARK_SECONDS,
    STALL_VERDICTS,
    Session,
    SessionLimits,
)
from outrider.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    MismatchedPair,
    NoReplica,
    OutriderError,
    StaleHandle,
    Unavailable,
)
from outrider.protocol.messages import (
    FinishReason,
    KvHandle,
    Mode,
    ModelInfo,
    Opened,
    SamplingParams,
    TokenBlock,
    TokenLogprob,
    Verdict,
    VerifyPolicy,
)

SERVED = ModelInfo("target", "hash", vocabulary_size=100, context_length=1000, eos_token_ids=(99,))
LIMITS = SessionLimits(recovery_seconds=10.0, stall_seconds=2.0)
GONE = Unavailable("gone")


def session(mode: Mode = Mode.AUTO, **fields: Any) -> Session:
    """A session of a three token prompt."""
    own = {name: fields.pop(name) for name in ("handle", "handle_endpoint") if name in fields}
    request = ResolvedRequest(
        request_id="r",
        served=SERVED,
        prompt=(1, 2, 3),
        mode=mode,
        **{"sampling": SamplingParams(max_tokens=50)} | fields,
    )
    return Session(request, 0, LIMITS, **own)


def started(mode: Mode = Mode.AUTO, **fields: Any) -> Session:
    """A session whose streams (verify 1, draft 2) are open and whose first token is committed."""
    machine = session(mode, **fields)
    machine.start(0.0)
    machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
    if mode is not Mode.OFF:
        machine.handle_event(DraftOpened(2, Opened("d", "i"), "draft:1"), 0.0)
    machine.handle_event(verdict(3, 10), 0.0)
    return machine


def verdict(base: int, *tokens: int, stream: int = 1, **fields: Any) -> VerdictArrived:
    """The verdict of step base - 2."""
    return VerdictArrived(stream, Verdict(base - 2, base, tokens, **fields))


def block(first_id: int, parents: tuple[int, ...], tokens: tuple[int, ...], **fields: Any) -> BlockArrived:
    """A block on stream 2."""
    return BlockArrived(2, TokenBlock(first_id, parents, tokens, (0.5,) * len(tokens), **fields))


def kinds(actions: list[Action]) -> list[type]:
    """What the actions are."""
    return [type(action) for action in actions]


def only(actions: list[Action], kind: type) -> Any:
    """The one action of a kind."""
    (found,) = [action for action in actions if type(action) is kind]
    return found


def opened(machine: Session) -> list[Action]:
    """What starting a session and the answer of its verify replica bring, which wants a draft."""
    actions = machine.start(0.0)
    return actions + machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)


def test_the_draft_opens_when_the_verify_replica_wants_one() -> None:
    """At its opening, before the prompt is computed; in pipelined mode with lookup."""
    actions = opened(session())
    assert kinds(actions) == [ConnectVerify, ConnectDraft, Announce]
    verify, draft = only(actions, ConnectVerify).opening, only(actions, ConnectDraft).opening
    assert (verify.token_ids, verify.policy, verify.lookup) == ((1, 2, 3), VerifyPolicy.PIPELINED, True)
    assert (draft.token_ids, draft.pipelined, draft.first_node_id) == ((1, 2, 3), True, 0)
    assert verify.vocabulary_hash == draft.vocabulary_hash == "hash"


def test_a_lone_session_opens_both_streams_at_once() -> None:
    """Its draft will be wanted: the draft reads the prompt while the target does."""
    machine = session()
    machine.alone = True
    assert kinds(machine.start(0.0)) == [ConnectVerify, ConnectDraft]
    assert kinds(machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)) == [Announce]


def test_modes_differ_in_what_is_opened() -> None:
    """OFF opens no draft; SEQUENTIAL opens both for taking turns, without lookup."""
    off = opened(session(Mode.OFF))
    assert kinds(off) == [ConnectVerify, Announce]
    assert only(off, ConnectVerify).opening.policy is VerifyPolicy.OFF
    turns = opened(session(Mode.SEQUENTIAL))
    assert only(turns, ConnectVerify).opening.policy is VerifyPolicy.SEQUENTIAL
    assert not only(turns, ConnectVerify).opening.lookup
    assert not only(turns, ConnectDraft).opening.pipelined


def test_every_verify_replica_gets_the_prediction() -> None:
    """The first one, and the one that the session moves to; the target alone has no use for it."""
    for mode, expected in ((Mode.AUTO, (7, 8)), (Mode.SEQUENTIAL, (7, 8)), (Mode.OFF, ())):
        machine = session(mode, prediction=(7, 8))
        assert only(machine.start(0.0), ConnectVerify).opening.prediction == expected
        moved = machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.0)
        assert only(moved, ConnectVerify).opening.prediction == expected


def test_resumed_tokens_count_as_generated() -> None:
    """Both replicas get prompt and resumed tokens, and where the prompt ends."""
    actions = opened(session(resumed=(7, 8)))
    for kind in (ConnectVerify, ConnectDraft):
        opening = only(actions, kind).opening
        assert (opening.token_ids, opening.prompt_length) == ((1, 2, 3, 7, 8), 3)


@pytest.mark.parametrize(
    ("resumed", "reason"), [((7,) * 50, FinishReason.LENGTH), ((7, 99), FinishReason.STOP)]
)
def test_finished_resumed_tokens_need_no_replica(resumed: tuple[int, ...], reason: FinishReason) -> None:
    """Resumed tokens that are complete finish at once, after the beginning."""
    assert session(resumed=resumed).start(0.0) == [Announce(), Finish(reason)]


def test_a_text_that_was_stopped_needs_no_replica() -> None:
    """Its tokens alone would not say that."""
    actions = session(resumed=(7, 8)).start(0.0, stopped=True)
    assert actions == [Announce(), Finish(FinishReason.STOP)]


def test_verdict_goes_to_the_draft_first() -> None:
    """A verdict is forwarded before its tokens are turned into text."""
    actions = started().handle_event(verdict(4, 11, 12), 0.1)
    assert kinds(actions) == [SendVerdict, Emit]


def test_last_verdict_finishes() -> None:
    """The verdict that carries a finish reason ends the session; nothing is done afterwards."""
    machine = started()
    actions = machine.handle_event(verdict(4, 11, finish_reason=FinishReason.STOP), 0.1)
    assert kinds(actions) == [SendVerdict, Emit, Finish]
    assert machine.finished
    assert machine.handle_event(verdict(5, 12), 0.2) == []
    assert machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.2) == []


def test_blocks_go_on_as_they_come() -> None:
    """In pipelined mode every block is forwarded at once."""
    machine = started()
    arrived = block(0, (-4,), (11,))
    assert machine.handle_event(arrived, 0.1) == [SendBlock(arrived.block)]


UNWANTED = {"draft_wanted": False}


def test_a_draft_that_is_not_wanted_pauses_and_is_ended_after_a_while() -> None:
    """It hears every verdict meanwhile; another is opened once a verdict wants one again."""
    machine = started()
    machine.handle_event(block(0, (-4,), (11,)), 0.1)
    for length, now in enumerate((0.2, PARK_SECONDS), 4):
        assert kinds(machine.handle_event(verdict(length, 11, **UNWANTED), now)) == [SendVerdict, Emit]
    late = machine.handle_event(verdict(6, 12, **UNWANTED), 0.1 + PARK_SECONDS)
    assert kinds(late) == [ParkDraft, Emit]
    assert kinds(machine.handle_event(verdict(7, 13, **UNWANTED), 9.8)) == [Emit]
    assert kinds(machine.handle_event(verdict(8, 14), 9.9)) == [Emit, ConnectDraft]


def test_a_draft_that_pauses_is_not_taken_for_a_silent_one() -> None:
    """It owes no block while none is wanted, nor for a while afterwards."""
    machine = started()
    for length in range(4, 4 + 2 * STALL_VERDICTS):
        now = 0.5 if length % 2 else 0.0
        assert DropDraft not in kinds(machine.handle_event(verdict(length, 11, **UNWANTED), now))
    assert DropDraft not in kinds(machine.handle_event(verdict(length + 1, 11), 0.5 + LIMITS.stall_seconds))


def test_a_session_whose_draft_is_not_wanted_begins_without() -> None:
    """The verify replica says so when it opens, and a later verdict may want one."""
    machine = session()
    machine.start(0.0)
    opened = VerifyOpened(1, Opened("v", "i", draft_wanted=False), "verify:1")
    assert kinds(machine.handle_event(opened, 0.5)) == [Announce]
    assert kinds(machine.handle_event(verdict(3, 11, **UNWANTED), 0.6)) == [Emit]
    assert kinds(machine.handle_event(verdict(4, 12), 0.7)) == [Emit, ConnectDraft]


def test_blocks_wait_for_the_target_to_open() -> None:
    """Blocks that come before another verify replica has opened are given to it when it has."""
    machine = session()
    opened(machine)
    machine.handle_event(DraftOpened(2, Opened("d", "i"), "draft:1"), 0.0)
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.0)
    assert machine.handle_event(block(0, (-3, 0), (10, 11)), 0.0) == []
    actions = machine.handle_event(VerifyOpened(3, Opened("v", "i"), "verify:2"), 0.1)
    sent = only(actions, SendBlock).block
    assert (sent.first_id, sent.parents, sent.tokens) == (0, (-3, 0), (10, 11))


def test_sequential_blocks_wait_for_ready() -> None:
    """In sequential mode blocks are held until the draft says it is the target's turn."""
    machine = started(Mode.SEQUENTIAL)
    first, second = block(0, (-4,), (11,)), block(1, (0,), (12,), ready=True)
    assert machine.handle_event(first, 0.1) == []
    assert machine.handle_event(second, 0.1) == [SendBlock(first.block), SendBlock(second.block)]
    assert kinds(machine.handle_event(verdict(4, 11), 0.2)) == [SendVerdict, Emit]


def test_sequential_target_is_told_to_go_on_without_a_draft() -> None:
    """In sequential mode a lost draft is replaced by empty ready blocks, at once and after each verdict."""
    machine = started(Mode.SEQUENTIAL)
    actions = machine.handle_event(DraftFailed(2, GONE, "draft:1"), 0.1)
    assert only(actions, SendBlock).block.ready
    assert len(only(actions, SendBlock).block) == 0
    nudged = machine.handle_event(verdict(4, 11), 0.2)
    assert only(nudged, SendBlock).block.base_length == 5


@pytest.mark.parametrize(
    "bad",
    [
        block(0, (-5,), (11,)),
        block(0, (0,), (11,)),
        block(0, (7,), (11,)),
        block(1 << 40, (-4,), (11,)),
        block(0, (-4,), (11,), base_length=9),
        BlockArrived(2, TokenBlock(0, (-4,), (11,), (1.5,))),
        BlockArrived(2, TokenBlock(0, (-4,), (11,), (-0.1,))),
    ],
)
def test_unsound_block_costs_the_draft_its_place(bad: BlockArrived) -> None:
    """A block that no sound draft sends never reaches the target; another draft is opened."""
    machine = started()
    actions = machine.handle_event(bad, 0.1)
    assert kinds(actions) == [DropDraft, ConnectDraft]
    assert isinstance(only(actions, DropDraft).error, InternalError)
    assert only(actions, ConnectDraft).avoid == "draft:1"
    assert machine.statistics.draft_losses == 1


def test_node_ids_may_not_come_twice() -> None:
    """A draft that uses a node id again is dropped."""
    machine = started()
    machine.handle_event(block(0, (-4,), (11,)), 0.1)
    assert DropDraft in kinds(machine.handle_event(block(0, (-4,), (12,)), 0.1))


def test_next_draft_gets_all_committed_tokens_and_ids_of_its_own() -> None:
    """After a loss the request goes on in the same step and another draft continues from there."""
    machine = started()
    opening = only(machine.handle_event(DraftFailed(2, GONE, "draft:1"), 0.1), ConnectDraft).opening
    assert opening.token_ids == (1, 2, 3, 10)
    assert (opening.first_node_id, opening.first_step) == (1 << 40, 1)


def test_drafts_that_fail_in_a_row_are_tried_ever_later() -> None:
    """The second draft lost without a block is replaced only after a pause, at a verdict."""
    machine = started()
    machine.handle_event(DraftFailed(2, GONE, "draft:1"), 1.0)
    assert kinds(machine.handle_event(DraftFailed(3, GONE, "draft:2"), 1.0)) == [DropDraft]
    assert kinds(machine.handle_event(verdict(4, 11), 1.2)) == [Emit]
    assert kinds(machine.handle_event(verdict(5, 12), 1.3)) == [Emit, ConnectDraft]


def test_a_draft_is_looked_for_while_there_is_none() -> None:
    """Without any draft replica the request asks again at verdicts, not more often than twice a second."""
    machine = started()
    machine.handle_event(DraftFailed(2, NoReplica("none"), ""), 1.0)
    assert machine.statistics.draft_losses == 0
    assert kinds(machine.handle_event(verdict(4, 11), 1.4)) == [Emit]
    assert kinds(machine.handle_event(verdict(5, 12), 1.5)) == [Emit, ConnectDraft]


def test_draft_that_finds_the_request_at_fault_ends_drafting() -> None:
    """When a draft cannot take the request at all, none is asked again."""
    machine = started()
    machine.handle_event(
        DraftFailed(2, ContextTooLong("token_ids", "too long for the draft"), "draft:1"), 1.0
    )
    assert kinds(machine.handle_event(verdict(4, 11), 100.0)) == [Emit]


def test_mismatched_draft_is_followed_by_another() -> None:
    """A draft with another vocabulary is dropped for a different one."""
    actions = started().handle_event(DraftFailed(2, MismatchedPair("other vocabulary"), "draft:1"), 1.0)
    assert kinds(actions) == [DropDraft, ConnectDraft]


def test_silent_draft_is_given_up() -> None:
    """A draft that sends nothing over many verdicts and seconds is lost; one that may be silent is not."""
    for may_be_silent, expected in [(False, True), (True, False)]:
        machine = session()
        machine.start(0.0)
        machine.handle_event(VerifyOpened(1, Opened("v", "i"), "verify:1"), 0.0)
        machine.handle_event(DraftOpened(2, Opened("d", "i"), "draft:1", may_be_silent), 0.0)
        actions = [machine.handle_event(verdict(3 + step, 10), step * 0.5) for step in range(9)]
        assert any(DropDraft in kinds(some) for some in actions) is expected


def test_a_draft_with_nothing_but_empty_blocks_is_at_work() -> None:
    """It computes a long text: it is not given up, and nothing of it goes to the target."""
    machine = started()
    for step in range(1, 20):
        assert not machine.handle_event(BlockArrived(2, TokenBlock(0, (), (), (), base_length=3)), step * 0.5)
        assert DropDraft not in kinds(machine.handle_event(verdict(2 + step, 10), step * 0.5))


def test_lost_verify_replica_is_replaced_with_all_tokens() -> None:
    """The next verify session has the committed tokens and goes on counting steps; the draft stays."""
    machine = started()
    machine.handle_event(verdict(4, 11, 12), 0.1)
    actions = machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 5.0)
    assert kinds(actions) == [DropVerify, ConnectVerify]
    connect = only(actions, ConnectVerify)
    assert connect.opening.token_ids == (1, 2, 3, 10, 11, 12)
    assert (connect.opening.prompt_length, connect.opening.first_step) == (3, 2)
    assert (connect.avoid, connect.not_before, connect.give_up_at) == ("verify:1", 5.0, 15.0)
    assert machine.statistics.verify_losses == 1


def test_new_verify_replica_is_given_what_is_alive() -> None:
    """Nodes below the last committed token are sent again with their ids; the rest is not."""
    machine = started()
    machine.handle_event(block(0, (-4, 0, 1, -4), (11, 12, 13, 20)), 0.1)
    machine.handle_event(verdict(4, 11), 0.2)
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.3)
    late = block(4, (2,), (14,), ready=True, base_length=5)
    assert machine.handle_event(late, 0.4) == []
    actions = machine.handle_event(VerifyOpened(3, Opened("w", "j"), "verify:2"), 0.5)
    first, second = (action.block for action in actions if isinstance(action, SendBlock))
    assert (first.first_id, first.parents, first.tokens) == (1, (-5, 1), (12, 13))
    assert (second.first_id, second.parents, second.tokens, second.ready) == (4, (2,), (14,), True)


def test_verdict_for_another_length_loses_the_replica() -> None:
    """A verdict that does not continue the committed tokens is not believed."""
    machine = started()
    actions = machine.handle_event(verdict(5, 11), 0.1)
    assert kinds(actions) == [DropVerify, ConnectVerify]
    assert machine.generated == [10]


@pytest.mark.parametrize(("wanted", "told"), [(None, (11,)), (0, ()), (0, (12,))])
def test_log_probabilities_of_other_tokens_lose_the_replica(
    wanted: int | None, told: tuple[int, ...]
) -> None:
    """Each token's would be shown at another one, or the caller, who asked, would get none."""
    machine = session(sampling=SamplingParams(logprobs=wanted, max_tokens=50))
    opened(machine)
    logprobs = tuple(TokenLogprob(token, -1.0) for token in told)
    actions = machine.handle_event(verdict(3, 11, logprobs=logprobs), 0.1)
    assert kinds(actions) == [DropVerify, ConnectVerify]


@pytest.mark.parametrize("tokens", [(), (100,)])
def test_impossible_verdicts_lose_the_replica(tokens: tuple[int, ...]) -> None:
    """So does a verdict without tokens, or with one outside the vocabulary."""
    assert DropVerify in kinds(started().handle_event(verdict(4, *tokens), 0.1))


@pytest.mark.parametrize(
    "counts",
    [
        {"verified": 257},
        {"verified": 1, "accepted": 2},
        {"verified": 9, "accepted": 3},
        {"verified": 2, "predicted": 3},
        {"verified": 2, "predicted": 1, "predicted_accepted": 2},
    ],
)
def test_counts_that_contradict_each_other_lose_the_replica(counts: dict[str, int]) -> None:
    """Sums of them are told to the caller."""
    assert DropVerify not in kinds(started().handle_event(verdict(4, 11, 12), 0.1))
    assert DropVerify in kinds(started().handle_event(verdict(4, 11, 12, **counts), 0.1))


def test_events_of_streams_given_up_are_ignored() -> None:
    """What still arrives from an earlier stream changes nothing."""
    machine = started()
    machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.1)
    assert machine.handle_event(verdict(4, 11, stream=1), 0.2) == []
    assert machine.handle_event(VerifyFailed(1, GONE, "verify:1"), 0.2) == []
    machine.handle_event(DraftFailed(2, GONE, "draft:1"), 0.3)
    assert machine.handle_event(block(0, (-4,), (11,)), 0.4) == []
    assert machine.generated == [10]


def test_stale_handle_is_replaced_by_tokens_on_the_same_replica() -> None:
    """A refused KV handle costs one more opening, with all tokens, where it was refused."""
    handle = KvHandle("v", "i", "kv", 2, b"", 0)
    machine = session(handle=handle, handle_endpoint="verify:1")
    first = only(machine.start(0.0), ConnectVerify)
    assert (first.opening.kv_handle, first.opening.token_ids, first.prefer) == (handle, (3,), "verify:1")
    again = only(
        machine.handle_event(VerifyFailed(1, StaleHandle("expired"), "verify:1"), 0.1), ConnectVerify
    )
    assert (again.opening.kv_handle, again.opening.token_ids) == (None, (1, 2, 3))
    assert (again.prefer, again.avoid) == ("verify:1", "")


def test_a_session_that_was_not_read_opens_where_it_was() -> None:
    """The replica that ended it is sound, and may still have its pages."""
    failed = VerifyFailed(1, DeadlineExceeded("not read"), "verify:1")
    again = only(started().handle_event(failed, 0.1), ConnectVerify)
    assert (again.opening.token_ids, again.prefer, again.avoid) == ((1, 2, 3, 10), "verify:1", "")


@pytest.mark.parametrize("error", [ContextTooLong("text", "too long"), NoReplica("none")])
def test_errors_that_no_other_replica_mends_end_the_request(error: OutriderError) -> None:
    """The request's own fault, and a wait for a replica that was in vain, are final."""
    actions = started().handle_event(VerifyFailed(1, error, "verify:1"), 0.1)
    assert actions[-1] == Fail(error)


def test_request_on_which_replicas_fail_internally_is_given_up() -> None:
    """A few internal errors in a row end the request: it may be what breaks the replicas."""
    machine, error, stream = started(), InternalError("bug"), 1
    for _ in range(MAX_INTERNAL_ERRORS - 1):
        stream = only(machine.handle_event(VerifyFailed(stream, error, "v:1"), 0.0), ConnectVerify).stream
    assert kinds(machine.handle_event(VerifyFailed(stream, error, "v:1"), 0.0)) == [DropVerify, Fail]


def test_statistics_count_what_happened() -> None:
    """Steps, nodes, accepted tokens and hits are summed; cached tokens are those of the first opening."""
    machine = session()
    machine.start(0.0)
    machine.handle_event(VerifyOpened(1, Opened("v", "i", 2), "verify:1"), 0.0)
    machine.handle_event(verdict(3, 10), 0.5)
    machine.handle_event(block(0, (-4, 0), (11, 12), expand_micros=70), 0.6)
    machine.handle_event(verdict(4, 11, 15, verified=2, accepted=1, hit=True), 0.7)
    statistics = machine.statistics
    assert (statistics.steps, statistics.drafted, statistics.verified, statistics.accepted) == (2, 2, 2, 1)
    assert (statistics.hits, statistics.cached, statistics.draft_us) == (1, 2, 70)
    assert statistics.first_token_at == 0.5
    assert statistics.acceptance_length == 1.5
