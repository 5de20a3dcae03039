"""Observes a session while it runs: counters, step records with their spans, and a shadow draft.

The pipeline reports what happened. Nothing here changes what a session does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.observing.drift import Reading
from orchestrator.observing.observer import Observer
from orchestrator.observing.timeline import Step, StepRecorder, TimelineEvent
from orchestrator.observing.tracing import StepSpans
from orchestrator.replicas.pool import Replica
from orchestrator.session import Session
from orchestrator.shadow.shadow import Shadow
from outrider.protocol.messages import PromptFeatures, TokenBlock, Verdict


class SessionMonitor:
    """Observes one session."""

    def __init__(
        self,
        session: Session,
        observer: Observer,
        recorder: StepRecorder | None,
        spans: StepSpans,
        begin_shadow: Callable[[Session], Shadow | None],
        clock: Callable[[], float],
    ) -> None:
        """Without a recorder, steps are neither traced nor shown to the client."""
        self.observer = observer
        self._recorder = recorder
        self._session = session
        self._spans = spans
        self._begin_shadow = begin_shadow
        self._clock = clock
        self._shadow: Shadow | None = None
        """Compares a shadow draft with the session's drafts; nothing waits for it."""
        self._prefill_ns = 0
        """Unix nanoseconds at which a verify session was asked for; 0 from its first verdict on."""

    @property
    def timeline(self) -> tuple[TimelineEvent, ...]:
        """The bars of all steps."""
        return () if self._recorder is None else tuple(self._recorder.events)

    def verify_asked(self) -> None:
        """The session asks for a stream to a verify replica."""
        self._prefill_ns = time.time_ns()
        if self._recorder is not None:
            self._recorder.reopened(self._prefill_ns)

    def draft_opened(self, stream: int, replica: Replica) -> None:
        """A draft admitted the session, which may get a shadow now."""
        self.observer.draft_opened(replica.endpoint)
        if self._shadow is None:
            self._shadow = self._begin_shadow(self._session)
        if self._shadow is not None and replica.info is not None:
            self._shadow.draft_opened(stream, replica.info.draft_name, self._session.committed)

    def draft_ended(self, stream: int) -> None:
        """A draft was given up, or is not wanted any more."""
        if self._shadow is not None:
            self._shadow.draft_ended(stream)

    def parked(self) -> None:
        """The session has no draft any more, because the verify replica wants none."""
        self.observer.parked()
        self._end_shadow()

    def features(self, part: PromptFeatures) -> None:
        """The target's features of a part of the text came."""
        if self._shadow is not None:
            self._shadow.features(part)

    def block(self, stream: int, block: TokenBlock) -> None:
        """A draft sent a sound block."""
        if self._shadow is not None:
            self._shadow.block(stream, block)
        self.observer.block(block, self._clock())
        if self._recorder is not None:
            self._recorder.add_block(block, time.time_ns())

    def verdict(self, verdict: Verdict) -> Step | None:
        """A step committed tokens; return the step if the client asked for steps."""
        if self._shadow is not None:
            self._shadow.verdict(verdict)
        drift = self.observer.verdict(verdict, self._clock())
        return None if self._recorder is None else self._record(self._recorder, verdict, drift)

    def delivered(self) -> None:
        """Tokens went to the client."""
        self.observer.delivered(self._clock())

    def close(self) -> None:
        """The session has ended."""
        self.observer.close()
        self._end_shadow()

    def _record(self, recorder: StepRecorder, verdict: Verdict, drift: Reading | None) -> Step | None:
        now_ns = time.time_ns()
        if self._prefill_ns:
            cached = self._session.statistics.cached
            self._spans.prefill(self._prefill_ns, now_ns, verdict.base_length, cached)
            self._prefill_ns = 0
        step = recorder.add_verdict(verdict, now_ns)
        self._spans.step(step, drift)
        return step if self._session.request.record_steps else None

    def _end_shadow(self) -> None:
        if self._shadow is not None:
            self._shadow.end()
        self._shadow = None
