"""The engine: one thread that owns the drafter, in a loop.

    absorb      what streams have sent: openings, verdicts, closings
    send        the new nodes of each session as one block, marked ready when it is time
    choose      the best unexpanded nodes over all sessions
    expand      one draft forward over them; add the children worth a node

What a verdict kills while the forward runs is not sent, because it is absorbed first. The engine sleeps
when nothing is worth expanding. Other threads only append to its inbox.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draft_service.calibration import Calibration
from outrider.decayed import Decayed
from draft_service.drafters.base import Drafter, Expansion, Proposal
from draft_service.outbox import Outbox
from draft_service.scheduler import Choice, choose, is_ready, share_of, should_send, to_suspend
from draft_service.session import DraftSession, Limits
from outrider.config import DraftConfig
from outrider.errors import Flood, InternalError, OutOfPages, Overloaded
from outrider.logs import get_logger
from outrider.messages import OpenDraft, TokenBlock, Verdict
from outrider.telemetry.instruments import DraftInstruments
from outrider.telemetry.spans import is_sampled, record_span, step_traceparent

logger = get_logger(__name__)
PENDING_PER_SESSION = 64
"""Messages that may wait for the engine, per session that may be open."""
SHARES = 8
"""One session's may be this part of all."""


@dataclass(slots=True)
class _Waiting:
    """Verdicts of a session that wait for the engine; each counter has one writer."""

    sent: int = 0
    """Put into the inbox (event loop)."""
    absorbed: int = 0
    """Taken out of it (engine thread)."""


@dataclass(slots=True)
class _Entry:
    session: DraftSession
    outbox: Outbox
    expanded: _Expanded | None = None
    asked_at: float | None = None
    """When the verdict arrived that no block has answered yet."""


@dataclass(frozen=True, slots=True)
class _Expanded:
    """When a session's unsent nodes were computed, and for which verify step."""

    start_ns: int
    micros: int
    step: int


class DraftEngine:
    """Grows the trees of all sessions with one drafter.

    `open`, `verdict`, `close`, `wake`, `sessions` and `pages` may be used from any thread; `step` only
    from one, which is the engine's own after `start`.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: DraftConfig,
        instruments: DraftInstruments,
        *,
        eos_token_ids: Sequence[int] = (),
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.calibration = Calibration()
        self.pages = drafter.pages()
        self._drafter = drafter
        self._config = config
        self._instruments = instruments
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_failure = on_failure
        self._clock = clock
        self._wall_ns = wall_ns
        self._keys = itertools.count()
        self._outboxes: dict[int, Outbox] = {}
        """Of all sessions that were asked for and not closed."""
        self._waiting: dict[int, _Waiting] = {}
        """Of the same; for the event loop."""
        self._entries: dict[int, _Entry] = {}
        self._step_seconds = Decayed()
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_bound = PENDING_PER_SESSION * config.max_sessions
        self._news = threading.Condition()
        self._woken = False
        self._stopping = False
        self.failure: InternalError | None = None
        """What ended the engine, unless it was stopped."""
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._entries)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close every session and wait for the thread to end."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()
        for key in list(self._outboxes):
            self._close(key)

    def open(self, request: OpenDraft, outbox: Outbox) -> int:
        """Ask for a session, which the outbox admits or refuses; `close` its key in any case.

        Raises:
            Overloaded: too much waits for the engine.
            InternalError: the engine has failed.
        """
        self._check_inbox()
        key = next(self._keys)
        self._outboxes[key] = outbox
        self._waiting[key] = _Waiting()
        self._post(lambda: self._open(key, request, outbox))
        return key

    def verdict(self, key: int, verdict: Verdict) -> None:
        """Tell a session what was committed.

        Raises:
            Flood: too much of this session waits for the engine.
            Overloaded: too much waits for the engine.
            InternalError: the engine has failed.
        """
        self._check_inbox()
        waiting, arrived = self._waiting[key], self._clock()
        if waiting.sent - waiting.absorbed >= max(PENDING_PER_SESSION, self._inbox_bound // SHARES):
            raise Flood("verdict: too many wait for the engine; open a new session with all tokens")
        waiting.sent += 1

        def commit() -> None:
            waiting.absorbed += 1
            self._commit(key, verdict, arrived)

        self._post(commit)

    def close(self, key: int) -> None:
        """End a session; its memory is free within one step. Doing it twice is harmless."""
        self._waiting.pop(key, None)
        self._post(lambda: self._close(key))

    def wake(self) -> None:
        """Look again: an outbox has room."""
        with self._news:
            self._woken = True
            self._news.notify()

    def step(self) -> bool:
        """One turn of the loop; returns False when nothing was worth expanding."""
        self._absorb()
        self._send()
        chosen = choose(self._expandable(), self._config.expansions)
        if chosen:
            self._expand(chosen)
        return bool(chosen)

    def _check_inbox(self) -> None:
        if self.failure is not None:
            raise self.failure
        if len(self._inbox) >= self._inbox_bound:
            raise Overloaded(f"{len(self._inbox)} messages wait for the engine, the limit; send fewer")

    def _post(self, message: Callable[[], None]) -> None:
        with self._news:
            self._inbox.append(message)
            self._news.notify()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    self._sleep()
        except Exception:  # the thread's own boundary: streams are told, then the process is
            logger.exception("the draft engine failed")
            self._fail()

    def _sleep(self) -> None:
        with self._news:
            while not (self._inbox or self._woken or self._stopping):
                self._news.wait()
            self._woken = False

    def _fail(self) -> None:
        failure = self.failure = InternalError("the draft engine failed; its log has the details")
        for outbox in list(self._outboxes.values()):
            outbox.close(failure)
        self._entries.clear()
        self._on_failure()

    def _absorb(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        for entry in self._entries.values():
            if entry.session.suspended and self._drafter.fits(entry.session.key):
                entry.session.suspended = False

    def _open(self, key: int, request: OpenDraft, outbox: Outbox) -> None:
        if len(self._entries) >= self._config.max_sessions:
            outbox.close(Overloaded(f"{len(self._entries)} sessions are open, the limit; retry later"))
            return
        try:
            cached_length = self._drafter.open(key, request)
        except Overloaded as refusal:
            outbox.close(refusal)
            return
        calibration = self.calibration.task(request.task)
        session = DraftSession(key, request, self._limits(request), calibration)
        session.grow(None, self._drafter.recall(key))
        self._entries[key] = _Entry(session, outbox)
        self._count()
        outbox.admit(cached_length)

    def _limits(self, request: OpenDraft) -> Limits:
        config, params = self._config, request.sampling
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        return Limits(
            max_nodes=min(request.max_nodes or config.max_nodes, config.max_nodes),
            max_depth=min(request.max_depth or config.max_depth, config.max_depth),
            context_length=self._drafter.context_length,
            end_tokens=eos.union(params.stop_token_ids),
            expands=self._drafter.expands,
        )

    def _commit(self, key: int, verdict: Verdict, arrived: float) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        session = entry.session
        first_unsent = session.first_unsent
        rerooted = session.commit(verdict, self._clock())
        self._drafter.commit(key, verdict.tokens, rerooted)
        if not session.finished:
            session.grow(None, self._drafter.recall(key))
            entry.asked_at = arrived if entry.asked_at is None else entry.asked_at
        self._instruments.verdict(verdict, session.request.task, session.starved)
        wasted = sum(node.id < first_unsent for node in rerooted.dropped)
        self._instruments.wasted(wasted, session.request.task)
        self._count()

    def _close(self, key: int) -> None:
        outbox = self._outboxes.pop(key, None)
        if outbox is not None:
            outbox.close()
        if self._entries.pop(key, None) is not None:
            self._drafter.close(key)
            self._count()

    def _count(self) -> None:
        self.pages = self._drafter.pages()
        self._instruments.sessions(len(self._entries))
        self._instruments.pages(self.pages.total, self.pages.used, self.pages.cached)

    def _expandable(self) -> list[DraftSession]:
        return [entry.session for entry in self._entries.values() if not entry.outbox.full]

    def _expand(self, chosen: list[Choice]) -> None:
        start_ns, start = self._wall_ns(), self._clock()
        grown = self._compute(chosen)
        seconds = self._clock() - start
        for choice, proposal in grown:
            if proposal is None:
                choice.session.put_back(choice.node)
            else:
                choice.session.grow(choice.node, proposal)
        for key in {choice.session.key for choice, proposal in grown if proposal is not None}:
            entry = self._entries[key]
            entry.expanded = _expanded(entry.expanded, start_ns, seconds, entry.session.step + 1)
        if grown and all(proposal is not None for _, proposal in grown):
            self._step_seconds.observe(seconds)
        self._instruments.expanded(len(grown), len({choice.session.key for choice, _ in grown}), seconds)

    def _compute(self, chosen: list[Choice]) -> list[tuple[Choice, Proposal | None]]:
        """The children of the chosen nodes, but for sessions that had to be suspended."""
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
        return []

    def _suspend_one(self) -> DraftSession:
        """Take the memory of one session; it goes on when it fits again."""
        sessions = (entry.session for entry in self._entries.values())
        session = to_suspend(session for session in sessions if not session.suspended)
        self._drafter.reset(session.key)
        session.suspended = True
        session.forget_expansions()
        return session

    def _send(self) -> None:
        """Send what is new; a session whose tree stops growing has then said ready."""
        share = share_of(self._expandable(), self._config.expansions)
        step_seconds, now = self._step_seconds.value or 0.0, self._clock()
        for entry in self._entries.values():
            session = entry.session
            if session.finished or entry.outbox.full:
                continue
            ready = not session.ready_sent and is_ready(session, share, step_seconds)
            if should_send(session, ready, now):
                entry.outbox.put(self._block(entry, ready, now))
                entry.expanded = None

    def _block(self, entry: _Entry, ready: bool, now: float) -> TokenBlock:
        self._instruments.block(entry.session.unsent_depths, entry.session.request.task)
        if entry.asked_at is not None:
            self._instruments.answered(now - entry.asked_at)
            entry.asked_at = None
        block = entry.session.next_block(ready, now)
        if entry.expanded is None:
            return block
        return _timed(block, entry.expanded, entry.session.request.traceparent)


def _expanded(before: _Expanded | None, start_ns: int, seconds: float, step: int) -> _Expanded:
    """The work behind the nodes that wait to be sent, one more expansion included."""
    micros = round(seconds * 1e6)
    return (
        _Expanded(start_ns, micros, step)
        if before is None
        else replace(before, micros=before.micros + micros)
    )


def _timed(block: TokenBlock, expanded: _Expanded, traceparent: str) -> TokenBlock:
    """The block with the times of its expansion and, for a sampled request, its span."""
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
    return replace(block, expand_start_ns=start_ns, expand_us=micros, traceparent=span)
