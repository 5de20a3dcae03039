"""The engine's work without its thread: one turn absorbs messages, plans, runs a step and publishes it.

Synchronous; the clock is injected. All output goes through `deliver`, which passes it to the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from outrider.config import VerifyConfig
from outrider.engine.kv.handles import HandleTable, check_covered
from outrider.engine.kv.pages import PoolStatistics, SequenceKv
from outrider.out_of_memory import lacks_memory
from outrider.protocol.errors import (
    InternalError,
    InvalidRequest,
    OutOfPages,
    OutriderError,
    StaleHandle,
    Unavailable,
    first_line,
)
from outrider.protocol.messages import KvHandle, ModelInfo, Opened, OpenVerify, Verdict, VerifyPolicy
from outrider.rpc.queues import Deliver
from outrider.speculation.acceptance import AcceptanceModel, lookup_priors
from outrider.speculation.lookup import GradualLookup
from outrider.speculation.prediction import Prediction
from outrider.telemetry.instruments import VerifyInstruments
from outrider.telemetry.logs import get_logger
from verify_service.mailbox import Ask, Close, Closed, Message, Open, Propose
from verify_service.memory import Memory, seniority
from verify_service.report import IdleMeter, count_verdict, record_forward, verdict_of
from verify_service.scheduler import Work
from verify_service.session import VerifyLimits, VerifySession
from verify_service.speculation.controller import Controller
from verify_service.speculation.cost_model import CostModel
from verify_service.speculation.lookup_candidates import LookupCandidates, PredictedCandidates
from verify_service.speculation.patience import Patience
from verify_service.speculation.several_drafts import Agreement
from verify_service.transfer.table import TransferTable
from verify_service.verifier import Runner, SessionOutcome, StepResult, Verifier

logger = get_logger(__name__)
SHORTER = 4
"""Steps have this many times fewer tokens once one has found no memory. A request survives five such
steps."""
SWEEP_SECONDS = 1.0
"""Seconds, while the engine is idle, between searches for handles whose lease is over, and until the page
accounts are checked."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Settings of the engine, fixed at its start."""

    replica: str
    incarnation: str
    limits: VerifyLimits
    max_step_tokens: int
    lease_seconds: float
    lookup: bool
    alone: bool = True
    """False where other ranks compute a part of each step, which they cannot take back."""

    @classmethod
    def of(cls, config: VerifyConfig, info: ModelInfo, max_step_tokens: int) -> CoreSettings:
        """Return the settings of a replica that serves `info`; a step may have fewer tokens than the
        configuration says."""
        limits = VerifyLimits(
            max_nodes=config.max_nodes,
            context_length=info.context_length,
            vocabulary_size=info.vocabulary_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            hidden_size=info.hidden_size,
        )
        lease = config.lease_seconds
        alone = config.tensor_parallel == 1
        return cls(info.replica, info.incarnation, limits, max_step_tokens, lease, config.lookup, alone)


class VerifyCore:
    """All sessions of one replica. It belongs to the engine thread."""

    def __init__(
        self,
        runner: Runner,
        cost: CostModel,
        settings: CoreSettings,
        instruments: VerifyInstruments,
        deliver: Deliver,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.sessions: dict[int, VerifySession] = {}
        self.handles = HandleTable(
            runner.pool, settings.replica, settings.incarnation, settings.lease_seconds, clock, wall_clock
        )
        self._runner = runner
        self._controller = Controller(cost, settings.max_step_tokens)
        self._settings = settings
        self._instruments = instruments
        self._deliver = deliver
        self._clock = clock
        self._verifier = Verifier(
            runner, settings.limits.eos_token_ids, clock, lambda: int(wall_clock() * 1e9)
        )
        self._memory = Memory(runner.pool, self.handles.release_oldest)
        self.transfers = TransferTable(
            self.handles, self._make_room, partial(self._recompute_seconds, cost), runner.settle
        )
        self._idle = IdleMeter(clock())
        self._lookup_acceptance = {greedy: AcceptanceModel(lookup_priors()) for greedy in (True, False)}
        """One model for greedy text and one for sampled text, which repeats itself less."""
        self._prediction_acceptance = AcceptanceModel(lookup_priors())
        self._agreement = Agreement()
        self._latest_patience = {greedy: Patience(settings.limits.max_patience) for greedy in (True, False)}
        """Patience of the session of greedy and of sampled text that got a verdict last. A new session starts
        with what it has learned; a draft's blocks bring more where the text is greedy."""
        self._unchecked_since: float | None = None
        """When the last message came; None once the page accounts have been checked since."""

    @property
    def statistics(self) -> PoolStatistics:
        """KV pages by state."""
        return self._runner.pool.statistics()

    @property
    def moving(self) -> int:
        """Sequences that another replica fetches or is about to fetch."""
        return self.handles.moving + len(self.transfers)

    def turn(self, messages: Iterable[Message]) -> float | None:
        """Absorb messages, plan and run a step, and publish it. Return how many seconds to sleep unless a
        message comes (None: until one comes)."""
        for message in messages:
            self._absorb(message)
        if self.handles.expire(self._clock()):
            self._count()
        sessions = sorted(self.sessions.values(), key=seniority)
        self._memory.resume(sessions)
        now = self._clock()
        plan = self._controller.plan(sessions, now)
        works = self._reserve(plan.works, sessions)
        if works:
            self._step(works, now, plan.price)
        if plan.works:
            return 0.0
        return self._rest() if plan.until is None else max(plan.until - now, 0.0)

    def _absorb(self, message: Message) -> None:
        self._unchecked_since = self._clock()
        match message:
            case Open():
                self._open(message)
            case Propose():
                self._propose(message)
            case Close():
                self._close(message)
            case Ask():
                self._answer(message)
            case _:
                assert_never(message)

    def _open(self, message: Open) -> None:
        outbox = message.stream.outbox
        try:
            session = self._make_session(message)
        except OutriderError as error:
            self._deliver([outbox.announce(error)])
            return
        self._controller.opened(session, list(self.sessions.values()))
        self.sessions[session.id] = session
        self._memory.resume(list(self.sessions.values()))
        cached = session.kv.length if session.kv is not None else 0
        opened = Opened(self._settings.replica, self._settings.incarnation, cached, session.draft_wanted)
        self._deliver([outbox.announce(opened)])
        self._count()

    def _make_session(self, message: Open) -> VerifySession:
        stream, opening, now = message.stream, message.opening, self._clock()
        self._memory.check_fits(opening.covered + len(opening.token_ids))
        kv = self._redeem(opening)
        before = kv.tokens if kv is not None and not opening.all_token_ids else ()
        committed = [*before, *opening.token_ids]
        if not self.sessions:
            self._idle.restart(now)
        patience = self._latest_patience[opening.sampling.greedy].successor()
        session = VerifySession(
            *(stream.id, opening, committed, self._settings.limits, stream.outbox, now, patience),
            message.matcher,
            self._agreement,
        )
        session.kv = kv
        session.idle_before = self._idle.until(now)
        if opening.lookup and self._settings.lookup:
            session.candidates.lookup = LookupCandidates(
                GradualLookup(committed), self._lookup_acceptance[opening.sampling.greedy], opening.task
            )
        if opening.prediction and opening.policy is not VerifyPolicy.OFF:
            prediction = Prediction(opening.prediction, committed[opening.prompt_length :])
            session.candidates.prediction = PredictedCandidates(
                prediction, self._prediction_acceptance, opening.task, session.max_nodes
            )
        return session

    def _redeem(self, opening: OpenVerify) -> SequenceKv | None:
        if opening.kv_handle is None:
            return None
        try:
            if opening.all_token_ids:
                check_covered(opening.kv_handle, opening.token_ids)
            return self.handles.take(opening.kv_handle)
        except StaleHandle:
            self._instruments.stale_handles.labels(self._why_stale(opening.kv_handle)).inc()
            raise

    def _why_stale(self, handle: KvHandle) -> str:
        if handle.owner != self._settings.replica:
            return "replica"
        return "incarnation" if handle.incarnation != self._settings.incarnation else "lease"

    def _propose(self, message: Propose) -> None:
        message.stream.absorbed += 1
        session = self.sessions.get(message.stream.id)
        if session is not None:
            dropped = session.propose(message.block, message.arrived)
            if dropped:
                self._instruments.nodes_dropped.inc(dropped)

    def _close(self, message: Close) -> None:
        session = self.sessions.pop(message.stream.id, None)
        if session is None:
            return
        handle: KvHandle | None = None
        if message.keep and session.kv is not None:
            goes_on = not session.finished and session.kv.length > 0
            handle = self.handles.keep(session.kv, moves=message.move and goes_on)
        else:
            session.release_pages()
        self._deliver([message.stream.outbox.announce(Closed(handle))])
        self._count()

    def _answer(self, message: Ask) -> None:
        try:
            answer = message.reply.announce(message.work())
        except OutriderError as error:
            answer = message.reply.announce(error)
        self._deliver([answer])
        self._count()

    def fork(self, handle: KvHandle) -> KvHandle:
        """See `HandleTable.fork`."""
        return self.handles.fork(handle, self._runner.fork)

    def _make_room(self, tokens: int) -> None:
        """See `Memory.make_room`."""
        self._memory.make_room(tokens, list(self.sessions.values()))

    def _recompute_seconds(self, cost: CostModel, tokens: int) -> float:
        """Return how long computing `tokens` tokens takes when nothing else runs."""
        largest = self._settings.max_step_tokens
        return tokens / largest * cost.seconds(largest)

    def _reserve(self, works: Sequence[Work], sessions: Sequence[VerifySession]) -> list[Work]:
        """Reserve pages. Count the sessions that are paused for lack of pages, and end those that can never
        fit."""
        reserved, paused = self._memory.reserve(works, sessions)
        for session in paused:
            self._instruments.preempted.inc()
            try:
                self._memory.check_fits(session.tree.committed_length)
            except OutOfPages as error:
                self._fail(session, error)
        return reserved

    def _verify(self, works: Sequence[Work], now: float) -> StepResult:
        for work in works:
            work.session.started(now)
        self._runner.drafting(self._controller.drafts_at_work)
        return self._verifier.run(works)

    def _step(self, works: Sequence[Work], now: float, price: float) -> None:
        try:
            result = self._verify(works, now)
        except (MemoryError, RuntimeError) as error:
            tokens = sum(work.tokens for work in works)
            if not lacks_memory(error) or tokens == 1 or not self._settings.alone:
                raise
            self._start_over(tokens, first_line(error))
        else:
            self._publish(result, price)

    def _start_over(self, tokens: int, reason: str) -> None:
        """After a step that found no memory: later ones are shorter, and open sessions have to be opened
        again. No page may be used again, because a runner may have put off moves until this step."""
        most = max(tokens // SHORTER, 1)
        self._controller.max_step_tokens = most
        self._instruments.without_memory.inc()
        logger.error(
            f"a step of {tokens} tokens found no memory ({reason}); until the next start, steps have at most "
            f"{most}; lower max_step_tokens or kv_tokens"
        )
        for session in list(self.sessions.values()):
            if session.finished:
                session.release_pages()
            else:
                self._fail(session, Unavailable("this replica had no memory for a step; open it again"))
        while self.handles.release_oldest():
            pass
        self._runner.pool.forget()
        self._count()

    def _fail(self, session: VerifySession, error: OutriderError) -> None:
        del self.sessions[session.id]
        session.release_pages()
        self._deliver([session.outbox.announce(error)])

    def _fail_without_numbers(self, session: VerifySession) -> None:
        """End a session whose model gives NaN, and make sure that no other one reuses its keys and values."""
        assert session.kv is not None, "it was in a step"
        self._runner.pool.withdraw(session.kv.pages)
        problem = f"after {session.tree.committed_length} tokens the model gives NaN"
        self._fail(session, InternalError(f"{problem}; set dtype=float32, or use other weights"))

    def _publish(self, result: StepResult, price: float) -> None:
        """Send the verdicts first, then learn from the step."""
        for session in result.without_numbers:
            self._fail_without_numbers(session)
        times = result.timings
        idle = self._idle.step(times.start, times.end)
        sessions = list(self.sessions.values())
        self._controller.decide_drafts(sessions, times.end)
        self._controller.decide_turns(sessions, result.tokens - result.prompt_tokens)
        verdicts = [(outcome, self._verdict(outcome, result, price)) for outcome in result.outcomes]
        prompts = [part.session.outbox.announce(part.found) for part in result.prompts]
        self._deliver([*prompts, *(each.session.outbox.announce(verdict) for each, verdict in verdicts)])
        for outcome, verdict in verdicts:
            session = outcome.session
            self._settle(session)
            session.published(times.end, self._idle.total, price)
            if session.policy is VerifyPolicy.PIPELINED:
                self._latest_patience[session.opening.sampling.greedy] = session.patience
            count_verdict(self._instruments, outcome, verdict)
            record_forward(outcome, verdict, result.tokens)
        self._controller.observe(result)
        self._instruments.step(result.tokens, result.sessions, times.end - times.start)
        self._instruments.idle.inc(idle)
        self._count()

    def _verdict(self, outcome: SessionOutcome, result: StepResult, price: float) -> Verdict:
        next_step = self._controller.next_step(result.tokens)
        return verdict_of(outcome, result, self._idle.total, price, next_step)

    def _settle(self, session: VerifySession) -> None:
        """End a session whose grammar allows no next token, or has become too costly."""
        if problem := session.settle():
            assert session.opening.sampling.constraint is not None
            message = f"after {session.tree.committed_length} tokens: {problem}; simplify it"
            self._fail(session, InvalidRequest(session.opening.sampling.constraint.field, message))

    def _rest(self) -> float | None:
        """Use a turn without work: without sessions, check the page accounts once."""
        if not self.sessions and self._unchecked_since is not None:
            if self._clock() - self._unchecked_since < SWEEP_SECONDS:
                return SWEEP_SECONDS
            self._runner.pool.check_integrity([*self.handles.sequences(), *self.transfers.sequences()])
            self._unchecked_since = None
        return SWEEP_SECONDS if len(self.handles) else None

    def _count(self) -> None:
        pages = self.statistics
        self._instruments.sessions.set(len(self.sessions))
        waiting = [s for s in self.sessions.values() if s.kv is None and not s.finished]
        self._instruments.queued.set(len(waiting))
        self._instruments.pages.set(pages.total, pages.used, pages.cached)
