"""The state machine of one continuation: events in, actions out. No I/O, no clock, no waiting.

    committed   prompt and generated tokens; only a verdict adds to it, and nothing is taken back
    verify      the stream to a verify replica; if it is lost, another is opened with the committed tokens
    drafts      the streams to draft replicas. They are opened when the verify replica says that drafts are
                wanted, and ended when it has not said so for a while. Without them the target goes on alone
    proposals   blocks of drafts on their way to the verify replica

Streams are numbered; events of a stream that was given up are ignored. `orchestrator.pipeline` carries out
the actions in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import assert_never

from orchestrator.candidates import BlockCheck, without_dead
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
    EmitPrompt,
    Event,
    Fail,
    FeaturesArrived,
    Finish,
    ParkDraft,
    PromptArrived,
    SendFeatures,
    SendVerdict,
    VerdictArrived,
    VerifyFailed,
    VerifyOpened,
)
from orchestrator.observing.statistics import Statistics
from orchestrator.openings import open_draft, open_verify
from orchestrator.proposals import Proposals
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.soundness import VerifyEvent, problem_of
from orchestrator.streams import (
    DRAFT_RETRY_SECONDS,
    VERIFY_RETRY_SECONDS,
    DraftStream,
    Losses,
    VerifyStream,
)
from outrider.protocol.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    ModelGone,
    NoReplica,
    OutOfPages,
    OutriderError,
    Overloaded,
    StaleHandle,
    Unavailable,
)
from outrider.protocol.messages import FinishReason, KvHandle, Mode, TokenBlock, TokenLogprob, Verdict

NO_DRAFT_RETRY_SECONDS = 0.5
"""Seconds between searches for a draft replica when none could be used."""
MAX_INTERNAL_ERRORS = 3
"""Number of verify replicas in a row with an internal error after which the request itself fails."""
MAX_BROKEN = 6
"""Number of verify replicas in a row, lost after they had opened, after which the request itself fails."""
PARK_SECONDS = 1.0
"""Seconds after which a draft that the verify replica does not want is ended, which frees its place."""
STALL_VERDICTS = 8
"""Number of verdicts after which a draft that was also silent for `stall_seconds` is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How long a session waits, and how many drafts it has."""

    recovery_seconds: float
    """Longest time without a verify replica, in seconds."""
    stall_seconds: float
    """Longest silence of a draft while verdicts keep coming, in seconds."""
    drafts: int = 1
    """Most draft streams at once."""


@dataclass(slots=True)
class Session:
    """One continuation of `request`; `seed` is the seed of this continuation."""

    request: ResolvedRequest
    seed: int
    limits: SessionLimits
    handle: KvHandle | None = None
    """Keys and values of an earlier turn; dropped when they turn out to be stale."""
    handle_endpoint: str = ""
    traceparent: str = ""
    alone: bool = False
    """True when no other session of this orchestrator runs: a draft is then opened before the verify replica
    asks for one."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose features the fleet's drafts read."""
    committed: list[int] = field(init=False)
    statistics: Statistics = field(default_factory=Statistics)
    finished: bool = False
    step: int = 0
    """Steps verified."""
    prompt_logprobs_sent: int = 1
    """The client has the log probabilities of the prompt before this position, if it wants them."""
    _announced: bool = False
    """True once the client knows what it needs to resume the continuation."""
    _verify: VerifyStream | None = None
    _drafts: dict[int, DraftStream] = field(default_factory=dict)
    """Draft streams by number."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers for further streams."""
    _opened_drafts: int = 0
    """Drafts opened so far."""
    _unserved_since: float = 0.0
    """When the session last had a verify replica, or was told that it is full, in seconds."""
    _verify_losses: Losses = field(default_factory=Losses)
    _draft_losses: Losses = field(default_factory=Losses)
    _drafting: bool = field(init=False)
    """False when the session has no drafts: its mode or its request excludes them."""
    _proposals: Proposals = field(init=False)

    def __post_init__(self) -> None:
        self.committed = [*self.request.prompt, *self.request.resumed]
        self._proposals = Proposals(self.request.mode is Mode.SEQUENTIAL)
        self._drafting = self.request.mode is not Mode.OFF
        if not self._drafting:
            self.feature_layers = ()

    @property
    def generated(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.committed[len(self.request.prompt) :]

    @property
    def needs_weights(self) -> bool:
        """Whether only a replica with the same weights may go on.

        That is so when the caller has named the weights, or was told which ones they are.
        """
        return self._announced or bool(self.request.model_version) or bool(self.generated)

    def start(self, now: float, stopped: bool = False) -> list[Action]:
        """Open the stream to a verify replica, or end at once when nothing follows the resumed tokens.

        Nothing follows them by the request's rules, or when their text was `stopped` by a stop string. A
        session that runs alone opens the stream to a draft replica at once too.
        """
        reason = FinishReason.STOP if stopped else self.request.finished_by(self.request.resumed)
        self._unserved_since = now
        if reason is not FinishReason.NONE:
            return [*self._announce(), *self._finish(reason)]
        return [*self._connect_verify(), *(self._find_drafts(now) if self.alone else [])]

    def handle_event(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from one event; none if its stream was given up."""
        if self.finished:
            return []
        match event:
            case BlockArrived() | DraftOpened() | DraftFailed():
                draft = self._drafts.get(event.stream)
                return [] if draft is None else self._on_draft_event(draft, event, now)
            case _:
                verify = self._verify
                current = verify is not None and event.stream == verify.stream
                return self._on_verify_event(verify, event, now) if verify and current else []

    def _on_verify_event(self, verify: VerifyStream, event: VerifyEvent, now: float) -> list[Action]:
        if problem := problem_of(event, self, verify):
            return self._lose_verify(verify, InternalError(f"verify replica: {problem}"), now)
        match event:
            case VerdictArrived():
                return self._on_verdict(verify, event.verdict, now)
            case PromptArrived():
                self.prompt_logprobs_sent += len(event.part.logprobs)
                return [EmitPrompt(event.part.logprobs)]
            case FeaturesArrived():
                return [SendFeatures(event.part)]
            case VerifyOpened():
                return self._on_verify_opened(verify, event, now)
            case VerifyFailed():
                return self._on_verify_failed(verify, event, now)
            case _:
                assert_never(event)

    def _on_draft_event(
        self, draft: DraftStream, event: BlockArrived | DraftOpened | DraftFailed, now: float
    ) -> list[Action]:
        match event:
            case BlockArrived():
                return self._on_block(draft, event.block, now)
            case DraftOpened() if draft.opened:
                return self._lose_draft(draft, InternalError("draft replica: opened twice"), now)
            case DraftOpened():
                draft.opened, draft.last_block_at = True, now
                draft.endpoint, draft.may_be_silent = event.endpoint, event.may_be_silent
                return []
            case DraftFailed():
                draft.endpoint = event.endpoint
                return self._lose_draft(draft, event.error, now)
            case _:
                assert_never(event)

    def stop(self) -> list[Action]:
        """The text has reached a stop string."""
        return self._finish(FinishReason.STOP)

    def _on_verify_opened(self, verify: VerifyStream, event: VerifyOpened, now: float) -> list[Action]:
        verify.opened = True
        verify.endpoint = event.endpoint
        if self.step == 0:
            self.statistics.cached = min(event.opened.cached_length, len(self.request.prompt))
        blocks = self._proposals.verify_opened(verify, self.committed, self._drafts.values())
        drafts = self._find_drafts(now) if event.opened.draft_wanted else []
        return [*blocks, *drafts, *self._announce()]

    def _announce(self) -> list[Action]:
        """Announce the continuation before the first token, unless it was announced already."""
        if self._announced:
            return []
        self._announced = True
        return [Announce(), *self._first_of_prompt()]

    def _first_of_prompt(self) -> list[Action]:
        """Emit the prompt's first token, which has no log probability, because nothing comes before it."""
        if not self.request.prompt_logprobs:
            return []
        return [EmitPrompt((TokenLogprob(self.request.prompt[0], 0.0),))]

    def _on_verdict(self, verify: VerifyStream, verdict: Verdict, now: float) -> list[Action]:
        self.committed.extend(verdict.tokens)
        self.step = verdict.step
        verify.room.refill()
        self._verify_losses = Losses()
        self._credit_drafts()
        self.statistics.add_verdict(verdict, now)
        finished = verdict.finish_reason is not FinishReason.NONE
        parked = [] if finished or verdict.draft_wanted else self._pause_drafts(now)
        informed = [SendVerdict(verdict)] if self._drafts else []
        actions = [*parked, *informed, Emit(verdict)]
        if finished:
            return actions + self._finish(verdict.finish_reason)
        nudge = self._proposals.nudge(verify, len(self.committed), self._drafts.values())
        return [*actions, *nudge, *(self._look_after_drafts(now) if verdict.draft_wanted else [])]

    def _on_verify_failed(self, verify: VerifyStream, event: VerifyFailed, now: float) -> list[Action]:
        verify.endpoint = event.endpoint
        if event.kept is not None and self._can_take_along(event.kept):
            dropped = DropVerify(event.error)
            self.handle, self.handle_endpoint = event.kept, event.endpoint
            self._unserved_since = now
            return [dropped, *self._connect_verify(avoid=event.endpoint)]
        return self._lose_verify(verify, event.error, now)

    def _can_take_along(self, kept: KvHandle) -> bool:
        """Whether kept keys and values can be used: not while log probabilities of the prompt are missing."""
        complete = self.prompt_logprobs_sent >= self.request.prompt_logprobs
        return complete and 0 < kept.length < len(self.committed)

    def _on_block(self, draft: DraftStream, block: TokenBlock, now: float) -> list[Action]:
        if error := draft.check.error_of(block, len(self.committed)):
            return self._lose_draft(draft, error, now)
        said_ready = draft.ready
        draft.block(block.ready and block.base_length == len(self.committed), now)
        self.statistics.add_block(block)
        block = without_dead(block, self.committed)
        others = [other for other in self._drafts.values() if other is not draft]
        if any(other.owes for other in others):
            block = replace(block, ready=False)
        if block.empty:
            return []
        if others and not draft.share.spend(len(block)):  # the remaining room is for the other drafts
            if not block.ready or said_ready:
                return []
            block = replace(block, parents=(), tokens=(), acceptances=())
        return list(self._proposals.add(block, self._verify))

    def _credit_drafts(self) -> None:
        """A verdict came: drafts may send more. Once all have sent sound blocks, earlier losses are over."""
        for draft in self._drafts.values():
            draft.verdict(self.limits.drafts)
        if self._drafts and all(draft.has_sent for draft in self._drafts.values()):
            self._draft_losses.count = 0

    def _pause_drafts(self, now: float) -> list[Action]:
        """No draft is wanted now: drafts pause by themselves, and are ended after `PARK_SECONDS`."""
        parked: list[Action] = []
        for draft in list(self._drafts.values()):
            draft.last_block_at = now  # a draft that pauses owes no block
            if now - draft.wanted_at > PARK_SECONDS:
                del self._drafts[draft.stream]
                parked.append(ParkDraft(draft.stream))
        return parked

    def _look_after_drafts(self, now: float) -> list[Action]:
        """After a verdict that wants drafts, find missing ones and give up those that have become silent."""
        actions: list[Action] = []
        for draft in list(self._drafts.values()):
            draft.wanted_at = now
            draft.verdicts_since_block += 1
            if self._stalls(draft, now):
                error = Unavailable(
                    f"draft replica sent nothing during {draft.verdicts_since_block} verdicts"
                )
                actions += self._lose_draft(draft, error, now)
        return actions + self._find_drafts(now)

    def _stalls(self, draft: DraftStream, now: float) -> bool:
        silent = now - draft.last_block_at > self.limits.stall_seconds
        long = draft.verdicts_since_block >= STALL_VERDICTS
        return draft.opened and not draft.may_be_silent and silent and long

    def _find_drafts(self, now: float) -> list[Action]:
        """Connect as many drafts as are missing, unless it is too early for another attempt."""
        if now < self._draft_losses.retry_at:
            return []
        missing = self.limits.drafts - len(self._drafts)
        return [action for _ in range(missing) for action in self._connect_draft(now)]

    def _lose_draft(self, draft: DraftStream, error: OutriderError, now: float) -> list[Action]:
        """Go on without this draft; connect another one now or at a later verdict."""
        del self._drafts[draft.stream]
        blocks = self._proposals.draft_lost(draft, self._verify, len(self.committed), self._drafts.values())
        dropped: list[Action] = [DropDraft(draft.stream, error), *blocks]
        if isinstance(error, NoReplica):
            self._draft_losses.retry_at = now + NO_DRAFT_RETRY_SECONDS
            return dropped
        self.statistics.draft_losses += draft.opened and not isinstance(error, Draining)
        self._draft_losses.add(error, draft.opened, now, DRAFT_RETRY_SECONDS)
        self._drafting = not isinstance(error, InvalidRequest)  # the request itself does not suit drafts
        again = self._connect_draft(now, draft.endpoint) if now >= self._draft_losses.retry_at else []
        return [*dropped, *again]

    def _lose_verify(self, verify: VerifyStream, error: OutriderError, now: float) -> list[Action]:
        """Open another verify replica with the committed tokens, unless the request itself is at fault."""
        dropped = DropVerify(error)
        opened, endpoint = verify.opened, verify.endpoint
        self._unserved_since = now if opened else self._unserved_since
        self._verify = None
        if isinstance(error, StaleHandle) and self.handle is not None:
            self.handle = None
            return [dropped, *self._connect_verify(prefer=endpoint)]
        if isinstance(error, Overloaded) and not isinstance(error, OutOfPages) and not opened:
            self._unserved_since = now
            return [dropped, *self._connect_verify()]  # only full: take another one, or this one later
        self.statistics.verify_losses += opened
        losses = self._verify_losses
        losses.add(error, opened, now, VERIFY_RETRY_SECONDS)
        hopeless = (
            isinstance(error, InvalidRequest | ModelGone | NoReplica)
            or losses.internal >= MAX_INTERNAL_ERRORS
            or losses.broken >= MAX_BROKEN
        )
        if hopeless or losses.retry_at >= self._unserved_since + self.limits.recovery_seconds:
            self.finished = True
            return [dropped, Fail(error)]
        self.handle = None  # the keys and values were at the lost replica
        if isinstance(error, DeadlineExceeded):  # the caller did not read; the replica may still have pages
            return [dropped, *self._connect_verify(prefer=endpoint)]
        return [dropped, *self._connect_verify(avoid=endpoint)]

    def _connect_verify(self, avoid: str = "", prefer: str = "") -> list[Action]:
        losses, covered = self._verify_losses, self.handle.length if self.handle else 0
        owner = self.handle_endpoint if self.handle else ""
        self._verify = VerifyStream(next(self._numbers))
        return [
            ConnectVerify(
                self._verify.stream,
                open_verify(self, covered),
                avoid=avoid,
                prefer=prefer or owner,
                owner=owner,
                covered=tuple(self.committed[:covered]),
                not_before=losses.retry_at,
                give_up_at=self._unserved_since + self.limits.recovery_seconds,
            )
        ]

    def _connect_draft(self, now: float, avoid: str = "") -> list[Action]:
        if not self._drafting:
            return []
        check = BlockCheck.of_draft(self._opened_drafts)
        draft = DraftStream(next(self._numbers), check, last_block_at=now, wanted_at=now)
        self._drafts[draft.stream] = draft
        self._opened_drafts += 1
        return [ConnectDraft(draft.stream, open_draft(self, check.next_id), avoid)]

    def _finish(self, reason: FinishReason) -> list[Action]:
        self.finished = True
        return [Finish(reason)]
