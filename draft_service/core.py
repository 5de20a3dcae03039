"""The draft engine's work without its thread. One turn:

    absorb      messages of streams: openings, verdicts, closings
    send        the new nodes of each session as one block, marked ready when it is time
    choose      the best unexpanded nodes over all sessions
    expand      one draft forward over them; add the children that are worth a node

Messages that come during a forward are absorbed before anything is sent, so nodes that a verdict has made
useless are not sent. Everything that a turn sends goes through `deliver` at once, before the forward.
Synchronous; the clock is injected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from draft_service.calibration import Calibration
from draft_service.drafters.base import Drafter, Expansion, FeatureReader, Proposal
from draft_service.mailbox import Admitted, Close, Commit, Event, Exchange, Message, Open, Tell
from draft_service.scheduler import NodeChoice, choose, is_ready, share_of, should_send, to_suspend
from draft_service.session import DraftLimits, DraftSession
from outrider.config import DraftConfig
from outrider.grammar.matcher import Matcher
from outrider.out_of_memory import lacks_memory, problem_of
from outrider.protocol.errors import OutOfPages, Overloaded, Unavailable
from outrider.protocol.messages import OpenDraft, TokenBlock, Verdict
from outrider.rpc.queues import Deliver, Delivery, Outbox
from outrider.speculation.decayed import Decayed
from outrider.telemetry.instruments import DraftInstruments
from outrider.telemetry.logs import get_logger
from outrider.telemetry.spans import is_sampled, record_span, step_traceparent

logger = get_logger(__name__)


@dataclass(slots=True)
class _OpenSession:
    """A session, and what the engine notes about it."""

    session: DraftSession
    outbox: Outbox[Event]
    expanded: _ExpansionTime | None = None
    computing: bool = False
    """True while a part of its text is not computed yet, which may take many turns."""
    asked_at: float | None = None
    """When the first verdict came that no block has answered yet; None: all are answered."""


@dataclass(slots=True)
class _ExpansionTime:
    """When a session's unsent nodes were computed, and for which verify step."""

    start_ns: int
    step: int
    micros: int = 0


class DraftCore:
    """Grows the trees of all sessions with one drafter. It belongs to the engine thread."""

    def __init__(
        self,
        drafter: Drafter,
        config: DraftConfig,
        instruments: DraftInstruments,
        deliver: Deliver,
        *,
        eos_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.calibration = Calibration()
        self.pages = drafter.pages()
        self._drafter = drafter
        self._reader = drafter if isinstance(drafter, FeatureReader) else None
        self._config = config
        self._instruments = instruments
        self._deliver = deliver
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._wall_ns = wall_ns
        self._entries: dict[int, _OpenSession] = {}
        self._step_seconds = Decayed()
        self._leaving: list[Delivery] = []
        """Deliveries for the event loop, to be made before the next forward."""

    def turn(self, messages: Iterable[Message]) -> float | None:
        """Absorb, send, choose, expand; return 0 while there is more to expand, otherwise None."""
        for message in messages:
            self._absorb(message)
        self._resume()
        self._send()
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            self._deliver(leaving)
        chosen = choose(self._expandable(), self._config.expansions)
        if not chosen:
            return None
        self._expand(chosen)
        return 0.0

    def _absorb(self, message: Message) -> None:
        match message:
            case Open():
                self._open(message)
            case Commit(stream, verdict, arrived):
                stream.absorbed += 1
                self._commit(stream.id, verdict, arrived)
            case Tell(stream, part):
                stream.absorbed += 1
                self._tell(stream.id, part.rows, part.position)
            case Close(stream):
                self._close(stream.id)
            case Exchange(apply):
                apply()
                for entry in self._entries.values():
                    entry.session.forget_expansions()
                self._count()
            case _:
                assert_never(message)

    def _resume(self) -> None:
        """Let suspended sessions go on if their memory fits again."""
        for entry in self._entries.values():
            if entry.session.suspended and self._drafter.fits(entry.session.key):
                entry.session.suspended = False

    def _open(self, message: Open) -> None:
        key, request, outbox = message.stream.id, message.request, message.stream.outbox
        try:
            cached_length = self._admit(key, request, message.matcher)
        except Overloaded as refusal:
            self._leaving.append(outbox.announce(refusal))
            return
        calibration = self.calibration.task(request.task)
        session = DraftSession(key, request, self._limits(request), calibration)
        session.grow(None, self._drafter.recall(key))
        self._entries[key] = _OpenSession(session, outbox)
        self._tell(key, b"")
        self._count()
        self._leaving.append(outbox.announce(Admitted(cached_length)))

    def _admit(self, key: int, request: OpenDraft, matcher: Matcher | None) -> int:
        if len(self._entries) >= self._config.max_sessions:
            raise Overloaded(f"{len(self._entries)} sessions are open, the limit; retry later")
        cached_length = self._drafter.open(key, request)
        if matcher is not None:
            self._drafter.constrain(key, matcher)
        return cached_length

    def _limits(self, request: OpenDraft) -> DraftLimits:
        config = self._config
        return DraftLimits(
            max_nodes=min(request.max_nodes or config.max_nodes, config.max_nodes, self._drafter.max_nodes),
            max_depth=min(request.max_depth or config.max_depth, config.max_depth),
            context_length=self._drafter.context_length,
            end_tokens=request.sampling.end_tokens(self._eos_token_ids),
            expands=self._drafter.expands,
            renews=self._reader is not None,
        )

    def _tell(self, key: int, rows: bytes, position: int | None = None) -> None:
        """Pass the target's features of a text to the drafter if it reads them. While they are missing, the
        session waits."""
        entry = self._entries.get(key)
        if entry is None or self._reader is None:
            return
        if rows:
            self._reader.tell(key, rows, position)
        entry.session.waiting = self._reader.waits(key)

    def _commit(self, key: int, verdict: Verdict, arrived: float) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        session = entry.session
        first_unsent = session.outbound.first_id
        rerooted = session.commit(verdict, self._clock())
        self._drafter.commit(key, verdict.tokens, rerooted)
        self._tell(key, verdict.features)
        if not session.finished:
            session.grow(None, self._drafter.recall(key))
            entry.asked_at = arrived if entry.asked_at is None else entry.asked_at
        if not session.wanted:
            entry.asked_at = None  # no answer is expected
        starved = session.starved and session.wanted and not session.finished
        self._instruments.starved.inc(session.request.task, starved)
        wasted = sum(node.id < first_unsent for node in rerooted.dropped)
        self._instruments.wasted.inc(session.request.task, wasted)
        self._count()

    def _close(self, key: int) -> None:
        if key in self._entries:
            self._drafter.close(key)
            del self._entries[key]
            self._count()

    def _count(self) -> None:
        self.pages = self._drafter.pages()
        self._instruments.sessions.set(len(self._entries))
        self._instruments.pages.set(self.pages.total, self.pages.used, self.pages.cached)

    def _expandable(self) -> list[DraftSession]:
        return [entry.session for entry in self._entries.values() if not entry.outbox.full]

    def _expand(self, chosen: list[NodeChoice]) -> None:
        start_ns, start = self._wall_ns(), self._clock()
        grown = self._compute(chosen)
        seconds = self._clock() - start
        for choice, proposal in grown:
            self._entries[choice.session.key].computing = proposal is None
            if proposal is None:
                choice.session.put_back(choice.node)
                self._to_the_end(choice.session.key)
            else:
                choice.session.grow(choice.node, proposal)
        for key in {choice.session.key for choice, proposal in grown if proposal is not None}:
            entry = self._entries[key]
            entry.expanded = entry.expanded or _ExpansionTime(start_ns, entry.session.step + 1)
            entry.expanded.micros += round(seconds * 1e6)
        if grown and all(proposal is not None for _, proposal in grown):
            self._step_seconds.observe(seconds)
        self._instruments.step(len({choice.session.key for choice, _ in grown}), seconds)

    def _to_the_end(self, key: int) -> None:
        """Let other sessions go first, so that a prompt of several steps does not hold its place."""
        self._entries[key] = self._entries.pop(key)

    def _compute(self, chosen: list[NodeChoice]) -> list[tuple[NodeChoice, Proposal | None]]:
        """Return the children of the chosen nodes, except those of sessions that had to be suspended."""
        while chosen:
            expansions = [
                Expansion(choice.session.key, choice.node, choice.session.calibration.sharpness)
                for choice in chosen
            ]
            try:
                return list(zip(chosen, self._drafter.expand(expansions), strict=True))
            except OutOfPages:
                suspended = self._suspend_one()
                chosen = [choice for choice in chosen if choice.session is not suspended]
            except (MemoryError, RuntimeError) as error:
                if not lacks_memory(error):
                    raise
                self._end_all(problem_of(error))
                chosen = []
        return []

    def _end_all(self, problem: str) -> None:
        """After a forward that found no memory: end all sessions, which may be opened again."""
        logger.error("the drafts of all open sessions end", problem=problem, sessions=len(self._entries))
        ended = Unavailable("this draft had no memory for a forward; open it again")
        for key, entry in list(self._entries.items()):
            self._leaving.append(entry.outbox.announce(ended))
            self._close(key)

    def _suspend_one(self) -> DraftSession:
        """Suspend one session and free its memory. It goes on when its memory fits again."""
        sessions = (entry.session for entry in self._entries.values())
        session = to_suspend(session for session in sessions if not session.suspended)
        self._drafter.reset(session.key)
        session.suspended = True
        self._tell(session.key, b"")
        session.forget_expansions()
        return session

    def _send(self) -> None:
        """Send new nodes. When a session's tree stops growing, a block marked ready is sent. An empty one
        shows after each verdict that a draft which computes a long text is at work."""
        share = share_of(self._expandable(), self._config.expansions)
        step_seconds, now = self._step_seconds.value or 0.0, self._clock()
        for entry in self._entries.values():
            session = entry.session
            if session.finished or entry.outbox.full:
                continue
            ready = not session.outbound.ready_sent and is_ready(session, share, step_seconds)
            sends = should_send(session, ready, now)
            if sends or (entry.computing and entry.asked_at is not None and not session.outbound.begun):
                self._leaving.append(entry.outbox.announce(self._block(entry, ready and sends, now)))
                entry.expanded = None

    def _block(self, entry: _OpenSession, ready: bool, now: float) -> TokenBlock:
        block = entry.session.next_block(ready, now)
        if entry.asked_at is not None and not block.empty:
            self._instruments.lag.observe(now - entry.asked_at)
            entry.asked_at = None
        self._instruments.nodes.inc(entry.session.request.task, len(block))
        if entry.expanded is None:
            return block
        return _timed(block, entry.expanded, entry.session.request.traceparent)


def _timed(block: TokenBlock, expanded: _ExpansionTime, traceparent: str) -> TokenBlock:
    """Return the block with the times of its expansion and, for a sampled request, its span."""
    start_ns, micros = expanded.start_ns, expanded.micros
    span = ""
    if is_sampled(traceparent):
        span = record_span(
            "draft.expand",
            parent=step_traceparent(traceparent, expanded.step),
            start_ns=start_ns,
            end_ns=start_ns + micros * 1000,
            attributes={
                "outrider.step.number": expanded.step,
                "outrider.block.nodes": len(block),
                "outrider.block.ready": block.ready,
                "outrider.block.base_length": block.base_length,
            },
        )
    return replace(block, expand_start_unix_nano=start_ns, expand_micros=micros, traceparent=span)
