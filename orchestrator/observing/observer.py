"""Counts what every continuation does: its steps, its need for drafts, and whether drafts still fit.

No I/O and no clock: `orchestrator.pipeline` says what happened and when.
"""

from __future__ import annotations

from collections import deque

from orchestrator.observing.draft_load import DraftLoad
from orchestrator.observing.drift import DriftWatch, Reading
from orchestrator.request.resolver import ResolvedRequest
from outrider.protocol.messages import TokenBlock, Verdict
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
RATE_SECONDS = 10
"""Seconds over which the rate of tokens is measured."""


class Observers:
    """Makes an observer for every continuation; they share drift detectors and counts of needed drafts."""

    def __init__(self, instruments: OrchestratorInstruments, drafts: bool = True) -> None:
        """`drafts`: whether there may be any; no session misses what nobody has set up."""
        self.drafts = drafts
        self.load = DraftLoad(instruments.draft_pool)
        self.tokens = TokenRate()
        self.drift = DriftWatch()
        self.instruments = instruments

    def watch(self, request: ResolvedRequest) -> Observer:
        """An observer of one continuation, to be closed at its end."""
        return Observer(self, request)


class Observer:
    """Watches one continuation; times are seconds of the caller's clock."""

    def __init__(self, shared: Observers, request: ResolvedRequest) -> None:
        self._tokens, self._load, self._drift = shared.tokens, shared.load, shared.drift
        self._may_draft = shared.drafts
        self._instruments = shared.instruments
        self._task = request.task
        self._wants_draft = False
        self._drafts: list[str] = []
        """Endpoints of the open draft replicas."""
        self._gaps = shared.instruments.requests.of(request.served.model).gap
        self._last_delivery: float | None = None
        self._last_verdict: float | None = None
        self._unanswered: tuple[int, float] | None = None
        """Committed length and time of the first verdict that the draft has not answered."""

    def wants_draft(self) -> None:
        """The session looks for a draft replica."""
        if self._may_draft and not self._wants_draft:
            self._wants_draft = True
            self._load.want(1)
            self._load.wait(1)

    def parked(self) -> None:
        """The session gave its draft up because the verify replica wants none."""
        self._load.parked()
        self.close()

    def close(self) -> None:
        """The continuation has ended, or wants no draft any more."""
        self._load.want(-self._wants_draft)
        self._load.wait(-self._waiting)
        self._wants_draft = False
        self._drafts = []
        self._unanswered = None

    def draft_opened(self, endpoint: str) -> None:
        """A draft replica admitted the session."""
        self._load.wait(-self._waiting)
        self._drafts.append(endpoint)

    def lost(self, kind: str, endpoint: str = "") -> None:
        """A replica was given up; the session goes on."""
        self._instruments.fallbacks.labels(kind).inc()
        if kind == "draft":
            self.left(endpoint)

    def left(self, endpoint: str) -> None:
        """The session leaves a draft replica, at fault or not."""
        if endpoint in self._drafts:
            self._drafts.remove(endpoint)
            self._load.wait(self._waiting)
        self._unanswered = None

    def block(self, block: TokenBlock, now: float) -> None:
        """The draft sent a block; an empty one is no answer."""
        if self._unanswered is not None and not block.empty and block.base_length >= self._unanswered[0]:
            self._load.answered(now - self._unanswered[1])
            self._unanswered = None

    def delivered(self, now: float) -> None:
        """Tokens went to the client."""
        if self._last_delivery is not None:
            self._gaps.observe(now - self._last_delivery)
        self._last_delivery = now

    def verdict(self, verdict: Verdict, now: float) -> Reading | None:
        """A step committed tokens; return the drift detector's reading if it raises the alarm."""
        self._instruments.speculation.step(verdict, self._task, self._draft)
        self._tokens.add(len(verdict.tokens), now)
        if self._wants_draft:
            self._count_time(verdict, now)
        self._last_verdict = now
        if not self._draft or not verdict.draft_wanted:  # the draft pauses
            return None
        self._load.step((verdict.times.forward_micros + verdict.times.sample_micros) * 1e-6)
        if self._unanswered is None:
            self._unanswered = (verdict.base_length + len(verdict.tokens), now)
        return self._look_for_drift(verdict)

    @property
    def _draft(self) -> str:
        """Endpoints of the session's open drafts, joined by +; empty: none is open."""
        return "+".join(sorted(self._drafts))

    @property
    def _waiting(self) -> bool:
        return self._wants_draft and not self._drafts

    def _count_time(self, verdict: Verdict, now: float) -> None:
        """Count the time since the last verdict. The time before the first verdict was prefill."""
        if self._last_verdict is not None:
            elapsed = max(now - self._last_verdict, 0.0)
            self._load.round(elapsed, verdict.times.idle_micros * 1e-6, missing=not self._draft)

    def _look_for_drift(self, verdict: Verdict) -> Reading | None:
        reading = self._drift.observe(self._task, self._draft, verdict)
        if reading is None:
            return None
        self._instruments.speculation.drift(self._task, self._draft, reading.statistic, reading.alarm)
        if not reading.alarm:
            return None
        logger.warning(
            "acceptance has fallen: the draft no longer fits this traffic",
            task=self._task,
            draft=self._draft,
            mean_before=round(reading.before, 3),
            steps=reading.steps,
        )
        return reading


class TokenRate:
    """Tokens per second that this orchestrator generates, for a balancer in front of several."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()
        """Pairs of a second of the clock and the tokens committed in it."""

    def add(self, tokens: int, now: float) -> None:
        """Tokens were committed."""
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            tokens += self._counts.pop()[1]
        self._counts.append((second, tokens))
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Tokens per second over the last `RATE_SECONDS`."""
        self._forget(now)
        return sum(tokens for _, tokens in self._counts) / RATE_SECONDS

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - RATE_SECONDS:
            self._counts.popleft()
