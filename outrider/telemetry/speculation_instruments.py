"""Metrics of speculation, as the orchestrator sees it in every verdict."""

from __future__ import annotations

from outrider.protocol.messages import Verdict
from outrider.telemetry.metric_parts import MAX_REPLICAS, Bundle, Maker, Tasks

NO_DRAFT = "none"
"""Label value for the steps without a draft replica."""


class SpeculationInstruments:
    """Metrics of every verify step, by traffic label and by the draft replica whose candidates it had."""

    def __init__(self, make: Maker) -> None:
        self._tasks = Tasks()
        labels = ("task", "draft")
        self._steps = Bundle(
            MAX_REPLICAS * 4,
            steps=make.counter("steps", "Verify steps.", *labels),
            nodes=make.counter("nodes_verified", "Candidate nodes verified.", *labels),
            accepted=make.counter("tokens_accepted", "Tokens that matched a node.", *labels),
            hits=make.counter("hits", "Steps whose bonus token was a candidate.", *labels),
            undrafted=make.counter("undrafted_steps", "Steps without nodes of a draft replica.", *labels),
            drifts=make.counter("drifts", "Falls of acceptance.", *labels),
            statistic=make.gauge("drift_statistic", "How near the next alarm is, 0 to 1.", *labels),
        )

    def step(self, verdict: Verdict, task: str, draft: str) -> None:
        """Record a verdict for a session that `draft` serves; empty if none does."""
        draft = draft or NO_DRAFT
        of = self._steps.of(self._tasks.name(task), draft)
        of.steps.inc()
        of.nodes.inc(verdict.verified)
        of.accepted.inc(verdict.accepted)
        of.hits.inc(verdict.hit)
        of.undrafted.inc(verdict.verified == verdict.lookup_verified)

    def drift(self, task: str, draft: str, statistic: float, alarm: bool) -> None:
        """Record the state of the drift detector of a task and draft replica after one more step."""
        of = self._steps.of(self._tasks.name(task), draft)
        of.statistic.set(statistic)
        of.drifts.inc(alarm)
