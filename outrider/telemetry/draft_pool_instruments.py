"""Metrics that show whether there are enough draft replicas."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from outrider.telemetry.metric_parts import STEP_BUCKETS, Maker


class DraftPoolInstruments:
    """Metrics of the pool of drafts; `docs/metrics.md` says when it is too small."""

    def __init__(self, make: Maker) -> None:
        self.wanted: Gauge = make.gauge("draft_sessions_wanted", "Sessions that want a draft.")
        self.waiting: Gauge = make.gauge(
            "draft_sessions_waiting", "Sessions that want a draft and have none."
        )
        self.parkings: Counter = make.counter("draft_parkings", "Drafts ended because drafting did not pay.")
        self.slots: Gauge = make.gauge("draft_slots", "Sessions that draft replicas have room for.")
        self.per_replica: Gauge = make.gauge(
            "draft_sessions_per_replica", "Sessions that a draft replica serves well."
        )
        pool = Maker("outrider_draft", make.registry)
        self.replicas_desired: Gauge = pool.gauge(
            "replicas_desired",
            "Draft replicas that this orchestrator needs.",
        )
        make.made += pool.made
        self.wanted_seconds: Counter = make.counter(
            "draft_wanted_seconds", "Session time in which drafts were wanted."
        )
        self.missing_seconds: Counter = make.counter(
            "draft_missing_seconds", "Session time in which a wanted draft was missing."
        )
        self.idle_seconds: Counter = make.counter(
            "draft_idle_seconds", "Session time in which drafts were wanted and the target ran no step."
        )
        self.lag_seconds = make.histogram(
            "draft_lag_seconds",
            "Time from a verdict to the first block after it.",
            STEP_BUCKETS,
        )
