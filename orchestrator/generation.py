"""Runs one admitted request. Its continuations run side by side, as far as there are places for them; one
queue carries them to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from orchestrator.collecting.collector import Collector
from orchestrator.observing.observer import Observers
from orchestrator.observing.timeline import StepRecorder
from orchestrator.observing.tracing import RequestTrace, StepSpans
from orchestrator.output import Chunk, Completion, Output, Started
from orchestrator.pipeline import Pipeline, first_error
from orchestrator.replicas.fleet import Fleet
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.request.ticket import Ticket
from orchestrator.session import Session, SessionLimits
from orchestrator.shadow.shadow import Shadow
from orchestrator.text.text_stream import TextStream
from orchestrator.text.tokenizer import TextTokenizer
from outrider.config import OrchestratorConfig
from outrider.protocol.messages import FinishReason, KvHandle

CLIENT_BUFFER = 64
"""Items that may wait for a slow client; at more, the continuations wait, and the replicas with them."""

Item = Started | Chunk | Completion
Write = Callable[[Item], Awaitable[None]]


@dataclass(slots=True)
class Generation:
    """Runs `request`, which came at `arrived` on `clock`."""

    request: ResolvedRequest
    fleet: Fleet
    config: OrchestratorConfig
    tokenizer: TextTokenizer | None
    observers: Observers
    trace: RequestTrace
    arrived: float
    place: Callable[[], AbstractAsyncContextManager[float]]
    """Where a continuation runs, once there is room; gives the seconds that this took from the arrival."""
    clock: Callable[[], float] = time.monotonic
    collector: Collector | None = None
    """Keeps some continuations for drafts to learn from; of a request the first at most."""
    begin_shadow: Callable[[Session], Shadow | None] = lambda session: None
    completions: list[Completion] = field(default_factory=list)
    """Continuations that have ended, for the metrics and the root span."""

    async def run(self, write: Write) -> None:
        """Write what the continuations give as it comes: of each its beginning, its chunks and its end.

        Raises:
            OutriderError: a continuation cannot be completed; the others are given up with it.
        """
        items: asyncio.Queue[Item] = asyncio.Queue(CLIENT_BUFFER)
        with first_error():
            async with asyncio.TaskGroup() as group:
                for index in range(self.request.sampling.n):
                    group.create_task(self._in_turn(index, items.put))
                while len(self.completions) < self.request.sampling.n:
                    item = await items.get()
                    await write(item)
                    if isinstance(item, Completion):
                        self.completions.append(item)

    async def _in_turn(self, index: int, emit: Write) -> None:
        async with self.place() as waited:
            await self._continue(index, waited, emit)

    async def _continue(self, index: int, waited: float, emit: Write) -> None:
        """One continuation, from opening its streams to closing them."""
        start_ns = time.time_ns()
        traceparent = self.trace.continuation(index)
        spans = StepSpans(traceparent, self.config.trace_detail, self.config.trace_slow_seconds)
        session = self._session(index, spans.of_replicas)
        output = Output(index, self._text())
        recorded = bool(traceparent) or self.request.record_timeline or self.request.record_steps
        recorder = StepRecorder(start_ns) if recorded else None
        pipeline = Pipeline(
            session,
            output,
            self.fleet,
            emit,
            self.observers.watch(self.request),
            self.config.draft_open_timeout_ms / 1000,
            recorder,
            self.clock,
            spans,
            self.begin_shadow,
        )

        async def end(kept: KvHandle | None) -> None:
            await emit(self._completion(index, waited, pipeline, output, recorder, kept))

        try:
            await pipeline.run(end)
            if index == 0 and self.collector is not None:
                served = len(self.request.prompt) + len(self.request.resumed) + output.consumed
                self.collector.offer(self.request, session.committed[:served])
        finally:
            spans.end(self.clock() - self.arrived)
            self.trace.record_continuation(traceparent, index, start_ns, time.time_ns())

    def _session(self, index: int, traceparent: str) -> Session:
        ticket = self._usable_ticket() if index == 0 else None
        config = self.config
        return Session(
            self.request if index == 0 else self.request.without_prompt_logprobs(),
            self.request.seed_of(index),
            SessionLimits(
                recovery_seconds=config.recovery_seconds,
                stall_seconds=config.draft_open_timeout_ms / 1000,
                drafts=config.drafts_per_session,
            ),
            handle=ticket.handle if ticket else None,
            handle_endpoint=ticket.endpoint if ticket else "",
            traceparent=traceparent,
            alone=index == 0 and not any(replica.reservations for replica in self.fleet.pools["verify"]),
            feature_layers=self.fleet.feature_layers(),
        )

    def _usable_ticket(self) -> Ticket | None:
        """The caller's session, if the prompt continues it and its replica still lives."""
        ticket = self.request.ticket
        if self.request.prompt_logprobs:  # they are computed, and what a ticket covers would not be
            return None
        if ticket is None or self.request.resumed or not ticket.covers(self.request.prompt):
            return None
        owner = self.fleet.pools["verify"].find(ticket.endpoint)
        if owner is None or owner.info is None or owner.info.incarnation != ticket.handle.incarnation:
            return None
        return ticket

    def _text(self) -> TextStream:
        request, tokenizer = self.request, self.tokenizer
        if tokenizer is None:
            return TextStream(None)
        sampling = request.sampling
        special = sampling.keep_special_tokens
        return TextStream(
            partial(tokenizer.decode, special_tokens=special),
            tokenizer.byte_tokens,
            sampling.stop,
            sampling.min_tokens,
            request.resumed,
            partial(tokenizer.has_no_text, special_tokens=special),
            sampling.include_stop,
        )

    def _completion(
        self,
        index: int,
        waited: float,
        pipeline: Pipeline,
        output: Output,
        recorder: StepRecorder | None,
        kept: KvHandle | None,
    ) -> Completion:
        request, session = self.request, pipeline.session
        statistics = session.statistics
        assert pipeline.reason is not FinishReason.NONE
        first_at = statistics.first_token_at or self.arrived
        session_bytes = b""
        if kept is not None and kept.length <= len(session.committed):
            session_bytes = Ticket.issue(pipeline.endpoint, kept, session.committed).serialize()
        return Completion(
            index=index,
            reason=pipeline.reason,
            stop=output.stop,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(request.resumed) + output.consumed,
            statistics=statistics,
            admission_seconds=waited,
            first_token_seconds=first_at - self.arrived,
            total_seconds=self.clock() - self.arrived,
            session=session_bytes,
            seed=session.seed,
            model=request.served.model,
            request_id=request.request_id,
            timeline=tuple(recorder.events) if recorder is not None and request.record_timeline else (),
            verify=pipeline.endpoint,
            draft=pipeline.draft_endpoint,
        )
