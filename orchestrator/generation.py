"""Runs one admitted request. Its continuations run side by side, as far as there are places for them. One
queue carries their items to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from orchestrator.collecting.collector import Collector
from orchestrator.links import first_error
from orchestrator.observing.monitor import SessionMonitor
from orchestrator.observing.observer import Observers
from orchestrator.observing.timeline import StepRecorder
from orchestrator.observing.tracing import RequestTrace, StepSpans
from orchestrator.output import Chunk, Completion, Output, Started
from orchestrator.pipeline import Pipeline
from orchestrator.replicas.fleet import Fleet
from orchestrator.request.resolver import ResolvedRequest
from orchestrator.request.ticket import Ticket
from orchestrator.session import Session, SessionLimits
from orchestrator.shadow.shadows import Shadows
from orchestrator.text.text_stream import TextStream
from orchestrator.text.tokenizer import TextTokenizer
from outrider.config import OrchestratorConfig
from outrider.protocol.messages import FinishReason, KvHandle

CLIENT_BUFFER = 64
"""Most items that wait for a slow client. Beyond that the continuations wait, and with them the replicas."""
PROMPT_END_TOKENS = 16
PROMPT_END_CHARACTERS = 64
"""Tokens and characters at the end of a conversation's prompt that its reader is shown."""

Item = Started | Chunk | Completion
Write = Callable[[Item], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Shared:
    """What all requests of the process share. Times are seconds of `clock`."""

    config: OrchestratorConfig
    fleet: Fleet
    observers: Observers
    shadows: Shadows
    collector: Collector | None
    """Keeps some continuations for drafts to learn from."""
    clock: Callable[[], float]


@dataclass(slots=True)
class Generation:
    """Runs `request`, which arrived at the time `arrived`."""

    shared: Shared
    request: ResolvedRequest
    tokenizer: TextTokenizer | None
    trace: RequestTrace
    arrived: float
    place: Callable[[], AbstractAsyncContextManager[float]]
    """A context that waits for room and runs one continuation. Yields the seconds since the arrival."""
    completions: list[Completion] = field(default_factory=list)
    """Continuations that were written to their end, for the metrics and the root span."""
    _open: dict[int, tuple[float, Pipeline]] = field(default_factory=dict)
    """Continuations that have begun and whose end was not written, by index: how long each waited, and its
    pipeline."""

    @property
    def cut(self) -> list[Completion]:
        """Continuations that have begun and whose end was not written, as far as they came."""
        ends = [self._completion(waited, pipeline, None) for waited, pipeline in self._open.values()]
        return [replace(end, reason=FinishReason.NONE) for end in ends]

    async def run(self, write: Write) -> None:
        """Write the items of all continuations as they come: the beginning, the chunks and the end of each.

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
                        del self._open[item.index]

    async def _in_turn(self, index: int, emit: Write) -> None:
        async with self.place() as waited:
            await self._continue(index, waited, emit)

    async def _continue(self, index: int, waited: float, emit: Write) -> None:
        """Run one continuation, from opening its streams to closing them."""
        start_ns, shared = time.time_ns(), self.shared
        traceparent = self.trace.continuation(index)
        spans = StepSpans(traceparent, shared.config.trace_detail, shared.config.trace_slow_seconds)
        session = self._session(index, spans.of_replicas)
        pipeline = Pipeline(
            session,
            Output(index, self._text(), self._prompt_end()),
            shared.fleet,
            emit,
            self._monitor(session, spans, StepRecorder(start_ns) if self._records(traceparent) else None),
            shared.config.draft_open_timeout_ms / 1000,
            shared.clock,
        )
        self._open[index] = waited, pipeline

        async def end(kept: KvHandle | None) -> None:
            await emit(self._completion(waited, pipeline, kept))

        try:
            await pipeline.run(end)
            if index == 0 and shared.collector is not None:
                served = len(self.request.prompt) + len(self.request.resumed) + pipeline.output.consumed
                shared.collector.offer(self.request, session.committed[:served])
        finally:
            spans.end(shared.clock() - self.arrived)
            self.trace.record_continuation(traceparent, index, start_ns, time.time_ns())

    def _records(self, traceparent: str) -> bool:
        return bool(traceparent) or self.request.record_timeline or self.request.record_steps

    def _monitor(self, session: Session, spans: StepSpans, recorder: StepRecorder | None) -> SessionMonitor:
        shared = self.shared
        observer = shared.observers.watch(self.request)
        return SessionMonitor(session, observer, recorder, spans, shared.shadows.begin, shared.clock)

    def _session(self, index: int, traceparent: str) -> Session:
        ticket = self._usable_ticket() if index == 0 else None
        config, fleet = self.shared.config, self.shared.fleet
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
            alone=index == 0 and not any(replica.reservations for replica in fleet.pools["verify"]),
            feature_layers=fleet.feature_layers(),
        )

    def _usable_ticket(self) -> Ticket | None:
        """The caller's ticket, if the prompt continues its session and its replica still runs."""
        ticket = self.request.ticket
        if self.request.prompt_logprobs:  # every position is computed; with a ticket they are not
            return None
        if ticket is None or self.request.resumed or not ticket.covers(self.request.prompt):
            return None
        owner = self.shared.fleet.pools["verify"].find(ticket.endpoint)
        if owner is None or owner.info is None or owner.info.incarnation != ticket.handle.incarnation:
            return None
        return ticket

    def _text(self) -> TextStream:
        if self.tokenizer is None:
            return TextStream(None)
        sampling = self.request.sampling
        special = sampling.keep_special_tokens
        return TextStream(
            partial(self.tokenizer.decode, special_tokens=special),
            self.tokenizer.byte_tokens,
            sampling.stop,
            sampling.min_tokens,
            self.request.resumed,
            self._has_no_text(self.tokenizer),
            sampling.include_stop,
            self.tokenizer.end_of(self.request.prompt, special),
        )

    def _has_no_text(self, tokenizer: TextTokenizer) -> Callable[[int], bool]:
        """Which generated tokens have no text: special ones, and, unless these are kept, those that end it.

        Some models mark no token that ends a text as special, and callers may name any. With its text, an
        answer in JSON would be none.
        """
        sampling, special = self.request.sampling, self.request.sampling.keep_special_tokens
        ends = frozenset() if special or sampling.include_stop else self.request.end_token_ids
        return lambda token: token in ends or tokenizer.has_no_text(token, special)

    def _prompt_end(self) -> str:
        if self.tokenizer is None or not self.request.chat:
            return ""
        last = self.request.prompt[-PROMPT_END_TOKENS:]
        return self.tokenizer.decode(last, special_tokens=True)[-PROMPT_END_CHARACTERS:]

    def _completion(self, waited: float, pipeline: Pipeline, kept: KvHandle | None) -> Completion:
        request, session, output = self.request, pipeline.session, pipeline.output
        first_at = session.statistics.first_token_at or self.arrived
        ticket = b""
        if kept is not None and kept.length <= len(session.committed):
            ticket = Ticket.issue(pipeline.endpoint, kept, session.committed).serialize()
        return Completion(
            index=output.index,
            reason=pipeline.reason,
            stop=output.stop,
            prompt_tokens=len(request.prompt),
            completion_tokens=len(request.resumed) + output.consumed,
            statistics=session.statistics,
            admission_seconds=waited,
            first_token_seconds=first_at - self.arrived,
            total_seconds=self.shared.clock() - self.arrived,
            session=ticket,
            seed=session.seed,
            model=request.served.model,
            request_id=request.request_id,
            timeline=pipeline.monitor.timeline if request.record_timeline else (),
            verify=pipeline.endpoint,
            draft=pipeline.draft_endpoint,
        )
