"""Carries out a session's actions: the one place where drafting and verification overlap.

One reader per stream puts events into one queue, and the session handles them in the order of their arrival.
Its actions queue messages for replicas, or chunks for the client. So in MODE_AUTO the draft may work while
the target verifies. The other modes run in the same loop: in MODE_SEQUENTIAL the session sends blocks only
when it is the target's turn, and in MODE_OFF it opens no draft.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

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
    SendFeatures,
    SendVerdict,
    VerifyFailed,
    VerifyOpened,
)
from orchestrator.links import Client, Link, first_error
from orchestrator.observing.monitor import SessionMonitor
from orchestrator.output import Chunk, Output, Started
from orchestrator.replicas.draft_client import DraftClient
from orchestrator.replicas.fleet import Fleet
from orchestrator.replicas.pool import NO_FAULT, Reservation
from orchestrator.replicas.stream import CLOSE_SECONDS
from orchestrator.replicas.verify_client import VerifyClient
from orchestrator.session import Session
from outrider.protocol.errors import Draining, Flood, NoReplica, OutriderError, Overloaded, Unavailable
from outrider.protocol.messages import FinishReason, KvHandle, PromptFeatures, Verdict
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
MAX_EVENTS = 64
"""Most events that wait while the client is slow. Beyond that the readers wait, and so do the replicas."""
MAX_LATE = 64
"""Most messages of replicas that may come after a session was closed. One more cancels its calls."""


class Pipeline:
    """Runs one session to its end. Items for the client go to `emit`, which may wait for a slow client."""

    def __init__(
        self,
        session: Session,
        output: Output,
        fleet: Fleet,
        emit: Callable[[Started | Chunk], Awaitable[None]],
        monitor: SessionMonitor,
        draft_open_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.reason = FinishReason.NONE
        self.endpoint = ""
        """Endpoint of the last verify replica that opened."""
        self.draft_endpoint = ""
        """Endpoint of the last draft replica that opened."""
        self.output = output
        self._fleet = fleet
        self._emit_item = emit
        self.monitor = monitor
        self._draft_open_seconds = draft_open_seconds
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue(MAX_EVENTS)
        self._streams = asyncio.TaskGroup()
        self._verify: Link[VerifyClient] | None = None
        self._drafts: dict[int, Link[DraftClient]] = {}
        """Draft links by stream number."""
        self._closing = False
        self._late = 0
        """Messages of replicas since `_closing` was set."""

    async def run(self, on_end: Callable[[KvHandle | None], Awaitable[None]]) -> None:
        """Generate to the end, call `on_end` with the kept keys and values, and close the streams.

        However it ends, no task, no call and no reservation is left.

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
            self.monitor.close()
            for link in self._links():
                link.release()

    async def _generate(self) -> None:
        await self._carry_out(self.session.start(self._clock(), stopped=bool(self.output.stop)))
        while self.reason is FinishReason.NONE:
            event = await self._events.get()
            await self._carry_out(self.session.handle_event(event, self._clock()))
            match event:
                case BlockArrived():
                    self._note_block(event)
                case VerifyOpened() | DraftOpened():
                    self._note_opened(event)
        if not self.output.stop:
            await self._emit_rest()

    async def _emit_rest(self) -> None:
        """Give out the text that was held back, now that the generation is over."""
        rest = self.output.flush()
        if self.output.stop:
            self.reason = FinishReason.STOP
        if rest is not None:
            await self._deliver([rest])

    async def _carry_out(self, actions: Sequence[Action]) -> None:
        """Perform actions in order, up to the one that ends the session."""
        for action in actions:
            if self.reason is not FinishReason.NONE:
                return
            await self._perform(action)

    async def _perform(self, action: Action) -> None:
        match action:
            case SendBlock():
                assert self._verify is not None
                self._verify.client.propose(action.block)
            case SendVerdict():
                await self._send_verdict(action.verdict)
            case SendFeatures():
                self._send_features(action.part)
            case Emit():
                await self._emit(action.verdict)
            case Announce():
                await self._announce()
            case EmitPrompt():
                await self._emit_item(Chunk(self.output.index, "", (), prompt_logprobs=action.logprobs))
            case ConnectVerify():
                self._connect_verify(action)
            case ConnectDraft():
                await self._connect_draft(action)
            case DropVerify():
                assert self._verify is not None
                self._drop(self._verify, action.error)
                self._verify = None
            case DropDraft():
                self.monitor.draft_ended(action.stream)
                self._drop(self._drafts.pop(action.stream), action.error)
            case ParkDraft():
                self._park_draft(action.stream)
            case Finish():
                self.reason = action.reason
            case Fail():
                raise action.error
            case _:
                assert_never(action)

    def _send_features(self, part: PromptFeatures) -> None:
        for link in self._drafts.values():
            link.client.tell(part)
        self.monitor.features(part)

    async def _send_verdict(self, verdict: Verdict) -> None:
        for link in self._drafts.values():
            link.client.commit(verdict)
        await asyncio.sleep(0)  # let the verdict leave before the text is made

    async def _announce(self) -> None:
        session, served = self.session, self.session.request.served
        running = served if self._verify is None else self._verify.info or served
        await self._emit_item(
            Started(
                index=self.output.index,
                request_id=session.request.request_id,
                seed=session.seed,
                model=served.model,
                prompt_tokens=len(session.request.prompt),
                cached_tokens=session.statistics.cached,
                model_version=running.version,
                prompt_end=self.output.prompt_end,
            )
        )

    async def _emit(self, verdict: Verdict) -> None:
        step = self.monitor.verdict(verdict)
        assert self._verify is not None
        self._verify.prove()
        for link in self._drafts.values():
            if link.sent_block:
                link.prove()
        await self._deliver(self.output.push(verdict.tokens, verdict.logprobs, step))
        if self.output.stop:
            await self._carry_out(self.session.stop())

    async def _deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            await self._emit_item(chunk)
        if chunks:
            self.monitor.delivered()

    def _connect_verify(self, action: ConnectVerify) -> None:
        client = VerifyClient(action.stream, action.opening, self._received)
        link = self._verify = Link("verify", client, self._fleet.pools["verify"])
        self.monitor.verify_asked()
        link.task = self._streams.create_task(self._run_verify(link, action))

    async def _connect_draft(self, action: ConnectDraft) -> None:
        client = DraftClient(action.stream, action.opening, self._received)
        beside = [other.endpoint for other in self._drafts.values()]
        link = self._drafts[action.stream] = Link("draft", client, self._fleet.pools["draft"])
        self.monitor.observer.wants_draft()
        prompt = self.session.request.prompt
        link.reservation = self._fleet.reserve_draft(prompt, client.abort, action.avoid, beside)
        if link.reservation is None:
            failed = DraftFailed(action.stream, NoReplica("no draft replica can be used"), "")
            await self._carry_out(self.session.handle_event(failed, self._clock()))
        else:
            client.reads_features = link.info is not None and link.info.reads(action.opening.feature_layers)
            link.task = self._streams.create_task(self._run_draft(link, link.reservation))

    def _park_draft(self, stream: int) -> None:
        link = self._drafts.pop(stream)
        self.monitor.draft_ended(stream)
        self.monitor.observer.left(link.endpoint)
        link.let_go()
        if not self._drafts:
            self.monitor.parked()

    def _drop(self, link: Link[Client], error: OutriderError) -> None:
        if link.reservation is not None:
            self._report_failure(link.kind, link.reservation, error)
        link.let_go()

    def _report_failure(self, kind: str, reservation: Reservation, error: OutriderError) -> None:
        endpoint = reservation.replica.endpoint
        if isinstance(error, Draining):
            logger.info("session moves", kind=kind, endpoint=endpoint)
            self.monitor.observer.left(endpoint)
        elif isinstance(error, NO_FAULT):
            logger.info("session refused", kind=kind, endpoint=endpoint, error=str(error))
            self.monitor.observer.left(endpoint)
        elif isinstance(error, Overloaded):
            logger.debug("replica has no room", kind=kind, endpoint=endpoint, error=str(error))
            self.monitor.observer.left(endpoint)
        else:
            logger.warning("replica lost", kind=kind, endpoint=endpoint, error=str(error))
            self.monitor.observer.lost(kind, endpoint)
        self._fleet.failed(kind, reservation, error)

    async def _run_verify(self, link: Link[VerifyClient], action: ConnectVerify) -> None:
        """Find a replica and run the stream to it; report its end to the session as an event."""
        error: OutriderError = Unavailable("the verify replica ended the stream")
        try:
            await asyncio.sleep(max(0.0, action.not_before - self._clock()))
            link.reservation = await self._fleet.reserve_verify(
                self.session.request.served,
                self.session.request.prompt,
                link.client.lose,
                needs_weights=self.session.needs_weights,
                avoid=action.avoid,
                prefer=action.prefer,
                give_up_at=action.give_up_at,
            )
            endpoint, info = link.endpoint, link.info
            assert info is not None, "a replica that can be reserved has said what it serves"
            channel = self._fleet.channel("verify", endpoint)
            await self._bring_keys(link.client, endpoint, action)
            await link.client.run(endpoint, channel, info.incarnation)
        except OutriderError as failure:
            error = failure
        await self._arrived(VerifyFailed(action.stream, error, link.endpoint, link.client.kept))

    async def _bring_keys(self, client: VerifyClient, endpoint: str, action: ConnectVerify) -> None:
        """Move the keys and values of the opening's handle to the replica at `endpoint`, unless it has them.
        If there is a grammar, it gets the tokens in any case: the grammar has to go through all of them.

        Raises:
            StaleHandle: they cannot be moved.
        """
        handle = action.opening.kv_handle
        if handle is None:
            return
        if action.owner != endpoint:
            handle = await self._fleet.move_kv(action.owner, endpoint, handle, action.covered)
        elif action.opening.sampling.constraint is None:
            return
        client.redeem(handle, action.covered)

    async def _run_draft(self, link: Link[DraftClient], reservation: Reservation) -> None:
        """Run the stream to a draft replica; report its end to the session as an event."""
        error: OutriderError = Unavailable("the draft replica ended the stream")
        may_be_silent = reservation.replica.info is not None and reservation.replica.info.kind == "lookup"
        try:
            endpoint = reservation.replica.endpoint
            channel = self._fleet.channel("draft", endpoint)
            await link.client.run(endpoint, channel, self._draft_open_seconds, may_be_silent)
        except OutriderError as failure:
            error = failure
        await self._arrived(DraftFailed(link.client.stream, error, link.endpoint))

    async def _received(self, event: Event) -> None:
        """Queue an event that a stream's reader brings; waits while the queue is full.

        Raises:
            Flood: a replica goes on sending although its session was closed.
        """
        self._late += self._closing
        if self._late > MAX_LATE:
            raise Flood("the replica goes on sending although its session was closed")
        await self._arrived(event)

    async def _arrived(self, event: Event) -> None:
        if not self._closing:
            await self._events.put(event)

    def _note_opened(self, event: VerifyOpened | DraftOpened) -> None:
        """Note that a stream opened, unless the session has given it up."""
        for link in self._links():
            if link.client.stream == event.stream and link.reservation is not None:
                self._fleet.admitted(link.reservation, event.opened.incarnation)
                if link.kind == "verify":
                    self.endpoint = event.endpoint
                else:
                    self.draft_endpoint = event.endpoint
                    self.monitor.draft_opened(event.stream, link.reservation.replica)

    def _note_block(self, event: BlockArrived) -> None:
        """Note a block, unless it made the session give up the draft."""
        if event.stream in self._drafts:
            self._drafts[event.stream].sent_block = True
            self.monitor.block(event.stream, event.block)

    def _links(self) -> list[Link[VerifyClient] | Link[DraftClient]]:
        return [*([self._verify] if self._verify is not None else []), *self._drafts.values()]

    async def _close(self) -> KvHandle | None:
        """Ask all replicas to end their sessions; wait for the kept keys and values if they are wanted."""
        self._closing = True
        while not self._events.empty():  # a reader that waits for room would not see the end of its stream
            self._events.get_nowait()
        for link in self._drafts.values():
            link.client.close()
        if self._verify is None:
            return None
        keep = self.session.request.keep_session
        self._verify.client.close(keep)
        if not keep:  # a replica that drains may have kept them all the same, for a move
            return None
        if self._verify.task is not None:
            await asyncio.wait({self._verify.task}, timeout=CLOSE_SECONDS)
        return self._verify.client.kept

    async def _end_streams(self) -> None:
        """Let the streams end by themselves; cancel those that have not after `CLOSE_SECONDS`."""
        tasks = {link.task for link in self._links() if link.task is not None}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
