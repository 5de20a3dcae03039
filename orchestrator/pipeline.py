"""Carries out what a session wants: the one place where drafting and verification overlap.

One queue of events feeds the session, one reader per stream fills the queue, and every action is a message
queued or a chunk handed on. What arrives first is handled first, so that in MODE_AUTO the draft works while
the target verifies. The sequential loop and the plain one are this loop: in MODE_SEQUENTIAL the session lets
blocks go only when it is the target's turn, in MODE_OFF it opens no draft.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

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
    Finish,
    ParkDraft,
    SendBlock,
    SendVerdict,
    VerifyFailed,
    VerifyOpened,
)
from orchestrator.observing.drift import Reading
from orchestrator.observing.observer import Observer
from orchestrator.observing.steps import Step, step_of
from orchestrator.observing.timeline import StepRecord, StepRecorder
from orchestrator.observing.tracing import StepSpans
from orchestrator.output import Chunk, Output, Started
from orchestrator.replicas.draft_client import DraftClient
from orchestrator.replicas.fleet import Fleet
from orchestrator.replicas.pool import Lease
from orchestrator.replicas.verify_client import VerifyClient
from orchestrator.session import Session
from outrider.protocol.errors import Draining, Flood, NoReplica, OutriderError, Overloaded, Unavailable
from outrider.protocol.messages import FinishReason, KvHandle, Verdict
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
MAX_EVENTS = 64
"""Events that may wait while the client is slow; then the readers wait, and gRPC makes the replicas wait."""
MAX_LATE = 64
"""Messages of replicas that may be on their way when a session is closed; then its calls are cancelled."""
CLOSE_SECONDS = 0.5
"""For a replica to end its stream after ours has ended; then the call is cancelled."""

Client = TypeVar("Client", VerifyClient, DraftClient)


@dataclass(slots=True)
class _Link(Generic[Client]):
    """A stream, the task that holds it, and the lease on its replica once there is one."""

    client: Client
    task: asyncio.Task[None] | None = None
    lease: Lease | None = None
    sent: bool = False
    """Blocks, as a sound draft does."""
    proven: bool = False
    """A verdict came, and the replica did its part."""


class Pipeline:
    """Runs one session to its end; what the client gets goes to `emit`, which may wait for a slow client."""

    def __init__(
        self,
        session: Session,
        output: Output,
        fleet: Fleet,
        emit: Callable[[Started | Chunk], Awaitable[None]],
        observer: Observer,
        draft_open_seconds: float,
        recorder: StepRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        spans: StepSpans | None = None,
    ) -> None:
        self.session = session
        self.reason = FinishReason.NONE
        self.endpoint = ""
        """Of the verify replica that the session ended on."""
        self.draft_endpoint = ""
        """Of the last draft replica that opened."""
        self._output = output
        self._fleet = fleet
        self._emit_item = emit
        self._observer = observer
        self._draft_open_seconds = draft_open_seconds
        self._recorder = recorder
        self._clock = clock
        self._spans = spans or StepSpans()
        self._events: asyncio.Queue[Event] = asyncio.Queue(MAX_EVENTS)
        self._streams = asyncio.TaskGroup()
        self._verify: _Link[VerifyClient] | None = None
        self._drafts: dict[int, _Link[DraftClient]] = {}
        """By stream."""
        self._opened_ns = 0
        """When the verify session began that has not brought a verdict yet; else 0."""
        self._closing = False
        self._late = 0
        """Messages of replicas since."""

    async def run(self, on_end: Callable[[KvHandle | None], Awaitable[None]]) -> None:
        """Generate to the end, call `on_end` with the kept keys and values, and close the streams.

        However it ends, no task, no call and no lease is left.

        Raises:
            OutriderError: the request cannot be completed.
        """
        try:
            with first_error():
                async with self._streams:
                    await self._generate()
                    await on_end(await self._close())
                    await self._end_streams()
        finally:
            self._release()

    async def _generate(self) -> None:
        await self._carry_out(self.session.start(self._clock()))
        while self.reason is FinishReason.NONE:
            event = await self._events.get()
            await self._carry_out(self.session.handle_event(event, self._clock()))
            match event:
                case BlockArrived():
                    self._note_block(event)
                case VerifyOpened() | DraftOpened():
                    self._note_opened(event)
        if not self._output.stop:
            await self._emit_rest()

    async def _emit_rest(self) -> None:
        """What was held back at the end; it may complete a stop string after all."""
        rest = self._output.flush()
        if self._output.stop:
            self.reason = FinishReason.STOP
        if rest is not None:
            await self._deliver([rest])

    async def _carry_out(self, actions: Sequence[Action]) -> None:
        """In order, up to the one that ends the session: a stop string may, in the middle."""
        for action in actions:
            if self.reason is not FinishReason.NONE:
                return
            await self._perform(action)

    async def _perform(self, action: Action) -> None:
        match action:
            case SendBlock():
                self._send_block(action)
            case SendVerdict():
                await self._send_verdict(action)
            case Emit():
                await self._emit(action)
            case Announce():
                await self._announce()
            case EmitPrompt():
                await self._emit_item(Chunk(self._output.index, "", (), prompt_logprobs=action.logprobs))
            case ConnectVerify():
                self._connect_verify(action)
            case ConnectDraft():
                await self._connect_draft(action)
            case DropVerify():
                self._drop_verify(action)
            case DropDraft():
                self._drop_draft(action)
            case ParkDraft():
                self._park_draft(action)
            case Finish():
                self.reason = action.reason
            case Fail():
                raise action.error
            case _:
                assert_never(action)

    def _send_block(self, action: SendBlock) -> None:
        assert self._verify is not None
        self._verify.client.propose(action.block)

    async def _send_verdict(self, action: SendVerdict) -> None:
        for link in self._drafts.values():
            link.client.commit(action.verdict)
        await asyncio.sleep(0)  # let it leave before the text is made

    async def _announce(self) -> None:
        session = self.session
        await self._emit_item(
            Started(
                index=self._output.index,
                request_id=session.request.request_id,
                seed=session.seed,
                model=session.request.served.model,
                prompt_tokens=len(session.request.prompt),
                cached_tokens=session.statistics.cached,
            )
        )

    async def _emit(self, action: Emit) -> None:
        verdict = action.verdict
        step = self._note_verdict(verdict)
        await self._deliver(self._output.push(verdict.tokens, verdict.logprobs, step))
        if self._output.stop:
            await self._carry_out(self.session.stop())

    async def _deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            await self._emit_item(chunk)
        if chunks:
            self._observer.delivered(self._clock())

    def _connect_verify(self, action: ConnectVerify) -> None:
        client = VerifyClient(action.stream, action.opening, self._received)
        link = self._verify = _Link(client)
        self._opened_ns = time.time_ns()
        if self._recorder is not None:
            self._recorder.reopened(self._opened_ns)
        link.task = self._streams.create_task(self._hold_verify(link, action))

    async def _connect_draft(self, action: ConnectDraft) -> None:
        client = DraftClient(action.stream, action.opening, self._received)
        beside = [_endpoint(other) for other in self._drafts.values()]
        link = self._drafts[action.stream] = _Link(client)
        self._observer.wants_draft()
        prompt = self.session.request.prompt
        link.lease = self._fleet.lease_draft(prompt, client.abort, action.avoid, beside)
        if link.lease is None:
            failed = DraftFailed(action.stream, NoReplica("no draft replica can be used"), "")
            await self._carry_out(self.session.handle_event(failed, self._clock()))
        else:
            link.task = self._streams.create_task(self._hold_draft(link, link.lease))

    def _drop_verify(self, action: DropVerify) -> None:
        link, self._verify = self._verify, None
        assert link is not None
        self._drop("verify", link, action.error)

    def _drop_draft(self, action: DropDraft) -> None:
        self._drop("draft", self._drafts.pop(action.stream), action.error)

    def _park_draft(self, action: ParkDraft) -> None:
        self._let_go("draft", self._drafts.pop(action.stream))
        if not self._drafts:
            self._observer.parked()

    def _drop(self, kind: str, link: _Link[Client], error: OutriderError) -> None:
        if link.lease is not None:
            self._hold_against(kind, link.lease, error)
        self._let_go(kind, link)

    def _let_go(self, kind: str, link: _Link[Client]) -> None:
        """End a stream; its replica has room for another session."""
        if link.task is not None:
            link.task.cancel()
        if link.lease is not None:
            self._fleet.pools[kind].release(link.lease)

    def _hold_against(self, kind: str, lease: Lease, error: OutriderError) -> None:
        endpoint = lease.replica.endpoint
        if kind == "draft" and isinstance(error, Draining):
            logger.info("draft session moves", endpoint=endpoint)
            self._observer.moved(endpoint)
        elif kind == "verify" and isinstance(error, Overloaded):
            logger.debug("replica has no room", kind=kind, endpoint=endpoint, error=str(error))
        else:
            logger.warning("replica lost", kind=kind, endpoint=endpoint, error=str(error))
            self._observer.lost(kind, endpoint)
        self._fleet.failed(kind, lease, error)

    async def _hold_verify(self, link: _Link[VerifyClient], action: ConnectVerify) -> None:
        """Find a replica and hold the stream to it; the session hears how it ended."""
        error: OutriderError = Unavailable("the verify replica ended the stream")
        try:
            await asyncio.sleep(max(0.0, action.not_before - self._clock()))
            link.lease = await self._fleet.lease_verify(
                self.session.request.prompt,
                link.client.abort,
                avoid=action.avoid,
                prefer=action.prefer,
                give_up_at=action.give_up_at,
            )
            channel = self._fleet.channel("verify", link.lease)
            await link.client.run(link.lease.replica.endpoint, channel)
        except OutriderError as failure:
            error = failure
        await self._arrived(VerifyFailed(action.stream, error, _endpoint(link)))

    async def _hold_draft(self, link: _Link[DraftClient], lease: Lease) -> None:
        """Hold the stream to a draft replica; the session hears how it ended."""
        error: OutriderError = Unavailable("the draft replica ended the stream")
        may_be_silent = lease.replica.info is not None and lease.replica.info.kind == "lookup"
        try:
            channel = self._fleet.channel("draft", lease)
            endpoint = lease.replica.endpoint
            await link.client.run(endpoint, channel, self._draft_open_seconds, may_be_silent)
        except OutriderError as failure:
            error = failure
        await self._arrived(DraftFailed(link.client.stream, error, _endpoint(link)))

    async def _received(self, event: Event) -> None:
        """What the streams' readers call; waits while the session is behind.

        Raises:
            Flood: a replica goes on and on though its session is being closed.
        """
        self._late += self._closing
        if self._late > MAX_LATE:
            raise Flood("the replica goes on though its session was closed")
        await self._arrived(event)

    async def _arrived(self, event: Event) -> None:
        if not self._closing:
            await self._events.put(event)

    def _note_opened(self, event: VerifyOpened | DraftOpened) -> None:
        for link in (self._verify, *self._drafts.values()):
            if link is not None and link.client.stream == event.stream and link.lease is not None:
                self._fleet.admitted(link.lease, event.opened.incarnation)
                if event.stream in self._drafts:
                    self._observer.draft_opened(event.endpoint)
                    self.draft_endpoint = event.endpoint

    def _note_block(self, event: BlockArrived) -> None:
        """Count a block that did not cost the draft its stream."""
        link = self._drafts.get(event.stream)
        if link is None:
            return
        link.sent = True
        self._observer.block(event.block, self._clock())
        if self._recorder is not None:
            self._recorder.add_block(event.block, time.time_ns())

    def _note_verdict(self, verdict: Verdict) -> Step | None:
        """Count and record it; its step, where the caller asked for that."""
        drift = self._observer.verdict(verdict, self._clock())
        assert self._verify is not None
        self._prove("verify", self._verify)
        for link in self._drafts.values():
            if link.sent:
                self._prove("draft", link)
        if self._recorder is None:
            return None
        record = self._record(self._recorder, verdict, drift)
        return step_of(record) if self.session.request.record_steps else None

    def _prove(self, kind: str, link: _Link[Client]) -> None:
        """A draft is not proven by its first block: one that floods sends good ones before."""
        if not link.proven and link.lease is not None:
            self._fleet.pools[kind].succeeded(link.lease)
            link.proven = True

    def _record(self, recorder: StepRecorder, verdict: Verdict, drift: Reading | None) -> StepRecord:
        now_ns = time.time_ns()
        if self._opened_ns:
            cached = self.session.statistics.cached
            self._spans.prefill(self._opened_ns, now_ns, verdict.base_length, cached)
            self._opened_ns = 0
        record = recorder.add_verdict(verdict, now_ns)
        self._spans.step(record, drift)
        return record

    async def _close(self) -> KvHandle | None:
        """Ask all replicas to end their sessions; wait for the kept keys and values if they are wanted."""
        self._closing = True
        while not self._events.empty():  # a reader that waits for room would not see the end of its stream
            self._events.get_nowait()
        for link in self._drafts.values():
            link.client.close()
        if self._verify is None:
            return None
        self.endpoint = _endpoint(self._verify)
        self._verify.client.close(keep=self.session.request.keep_session)
        if self.session.request.keep_session and self._verify.task is not None:
            await asyncio.wait({self._verify.task}, timeout=CLOSE_SECONDS)
        return self._verify.client.kept

    async def _end_streams(self) -> None:
        """Let the streams end by themselves; cancel what has not after a moment."""
        tasks = {
            link.task
            for link in (self._verify, *self._drafts.values())
            if link is not None and link.task is not None
        }
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()

    def _release(self) -> None:
        self._observer.close()
        drafts = [("draft", link) for link in self._drafts.values()]
        for kind, link in (("verify", self._verify), *drafts):
            if link is not None and link.lease is not None:
                self._fleet.pools[kind].release(link.lease)


def _endpoint(link: _Link[Client]) -> str:
    return link.lease.replica.endpoint if link.lease is not None else ""


@contextmanager
def first_error() -> Iterator[None]:
    """Around a task group: raises the first error itself instead of a group with it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
