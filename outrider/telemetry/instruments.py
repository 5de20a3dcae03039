"""Every Prometheus metric of the services. Counters are raw; queries compute the ratios.

`docs/metrics.md`, which is generated from this module, lists them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from outrider.protocol.messages import Verdict
from outrider.telemetry.file_instruments import FileInstruments
from outrider.telemetry.metric_parts import (
    MAX_DRAFTS,
    MAX_TASKS,
    OTHER,
    SIZE_BUCKETS,
    STEP_BUCKETS,
    Bundle,
    ByTask,
    Capacity,
    Estimates,
    Maker,
    PageMetrics,
    Positions,
    Tasks,
    start_at_zero,
)
from outrider.telemetry.request_metrics import FIRST_TOKEN_BUCKETS, request_metrics
from outrider.telemetry.shadow_instruments import ShadowInstruments

REJECTIONS = (
    *("CONTEXT_TOO_LONG", "DEADLINE_EXCEEDED", "INVALID_REQUEST"),
    *("NO_REPLICA", "OVERLOADED", "RATE_LIMITED", "UNKNOWN_MODEL"),
)
ENDINGS = (
    *("stop", "length", "cancelled", "not_read", "deadline_exceeded", "internal_error"),
    *("model_gone", "no_replica", "unavailable"),
)
"""Reasons that are on the page from the start. A series that begins with its first event hides that event
from `rate`, which needs the zero before it."""
COLLECTED = ("written", "dropped", "failed")
"""Outcomes of a continuation that is to be kept; it is dropped if too many wait or if it is too long for a
file, and fails if the disk refuses it."""


class VerifyInstruments:
    """Metrics of the verify service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = Maker("outrider_verify", registry)
        self.described = make.made
        self._tasks = Tasks()
        self._by_task = _by_task(make)
        self._verified, self._accepted = (
            Positions(
                make.counter(
                    f"position_{did}", f"Steps that {did} a candidate this deep.", "position", "task"
                )
            )
            for did in ("verified", "accepted")
        )
        self._lookup = make.counter("lookup_nodes_verified", "Verified nodes of prompt lookup.")
        self.nodes_dropped = make.counter("nodes_dropped", "Proposed nodes that were stale on arrival.")
        self._estimates = Estimates(make)
        self._step_seconds = make.histogram("step_seconds", "Time of a step.", STEP_BUCKETS)
        self._step_tokens = make.histogram("step_tokens", "Tokens of a step's forward.", SIZE_BUCKETS)
        self._step_sessions = make.histogram("step_sessions", "Sessions of a step.", SIZE_BUCKETS)
        self.idle = make.counter("idle_seconds", "Time without a step, with sessions open.")
        self.sessions = make.gauge("sessions", "Open sessions.")
        self.queued = make.gauge("queued_sessions", "Sessions that wait for KV pages.")
        self.pages = PageMetrics(make)
        self.capacity = Capacity(make)
        self.preempted = make.counter("preemptions", "Sessions paused for want of KV pages.")
        self.without_memory = make.counter(
            "steps_without_memory", "Steps that found no memory; later ones are shorter until the next start."
        )
        self.stale_handles = make.counter("stale_handles", "KV handles refused.", "reason")
        start_at_zero(self.stale_handles, ("replica", "incarnation", "lease"))
        self.files = FileInstruments(make)

    def verdict(self, verdict: Verdict, task: str, first: bool = False) -> None:
        """Record that a step committed tokens for one session; the time of its `first` is prefill."""
        task = self._tasks.name(task)
        of, times = self._by_task.of(task), verdict.times
        of.steps.inc()
        of.tokens.inc(len(verdict.tokens))
        of.verified.inc(verdict.verified)
        of.accepted.inc(verdict.accepted)
        of.hits.inc(verdict.hit)
        self._verified.reach(task, verdict.depth)
        self._accepted.reach(task, verdict.accepted)
        self._lookup.inc(verdict.lookup_verified)
        if not first:
            busy = times.forward_micros + times.sample_micros
            of.seconds.inc((times.queue_micros + busy) * 1e-6)
            of.busy.inc(busy * 1e-6)
            of.idle.inc(times.idle_micros * 1e-6)

    def estimates(self, nodes: Iterable[tuple[float, bool]]) -> None:
        """Record verified nodes, as (estimated reach, whether it was accepted)."""
        for reach, accepted in nodes:
            self._estimates.add(reach, accepted)

    def step(self, tokens: int, sessions: int, seconds: float) -> None:
        """Record a forward."""
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(tokens)
        self._step_sessions.observe(sessions)


def _by_task(make: Maker) -> Bundle:
    """The counters that every verdict increases, by traffic label."""

    def counter(name: str, text: str) -> Counter:
        return make.counter(name, text, "task")

    return Bundle(
        MAX_TASKS + 2,
        steps=counter("steps", "Session steps."),
        tokens=counter("tokens", "Tokens committed."),
        verified=counter("nodes_verified", "Candidate nodes verified."),
        accepted=counter("nodes_accepted", "Tokens that matched a node."),
        hits=counter("hits", "Steps whose bonus token was a candidate."),
        seconds=counter("round_seconds", "Time between a session's verdicts, after the first."),
        busy=counter("round_busy_seconds", "Time between a session's verdicts that its step took."),
        idle=counter("round_idle_seconds", "Time between a session's verdicts without a step of the target."),
    )


class DraftInstruments:
    """Metrics of the draft service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = Maker("outrider_draft", registry)
        self.described = make.made
        tasks = Tasks()
        self._seconds = make.histogram("step_seconds", "Time of a draft forward.", STEP_BUCKETS)
        self._step_sessions = make.histogram("step_sessions", "Sessions of a draft forward.", SIZE_BUCKETS)
        self.nodes = ByTask(tasks, make.counter("nodes", "Nodes sent in token blocks.", "task"))
        wasted = make.counter("nodes_wasted", "Sent nodes dropped, as the target went elsewhere.", "task")
        self.wasted = ByTask(tasks, wasted)
        self.starved = ByTask(
            tasks, make.counter("starvations", "Verdicts that left the target without candidates.", "task")
        )
        self.lag = make.histogram("lag_seconds", "Time from a verdict to the next block.", STEP_BUCKETS)
        self.sessions = make.gauge("sessions", "Open sessions.")
        self.pages = PageMetrics(make)
        self.capacity = Capacity(make)
        self._weights = make.gauge("weights", "1 for the version of the weights in use.", "version")
        self.files = FileInstruments(make)

    def weights(self, version: str) -> None:
        """Record that these weights are in use from now on."""
        self._weights.clear()
        self._weights.labels(version).set(1)

    def step(self, sessions: int, seconds: float) -> None:
        """Record a draft forward."""
        self._seconds.observe(seconds)
        self._step_sessions.observe(sessions)


class LabelInstruments:
    """Counts by name and value of labels. The first names, and the first values of each name, are counted by
    themselves; later ones share "other"."""

    def __init__(self, make: Maker) -> None:
        labels = ("label", "value")
        self._requests = make.counter("labelled_requests", "Requests that ended, by label.", *labels)
        self._tokens = make.counter("labelled_tokens", "Tokens generated, by label.", *labels)
        self._names = Tasks()
        self._values: defaultdict[str, Tasks] = defaultdict(Tasks)

    def finished(self, labels: Mapping[str, str], tokens: int) -> None:
        """Record the end of a request with these labels, for which `tokens` tokens were generated."""
        for name, value in labels.items():
            key = self._key(name, value)
            self._requests.labels(*key).inc()
            self._tokens.labels(*key).inc(tokens)

    def _key(self, name: str, value: str) -> tuple[str, str]:
        known = self._names.name(name)
        return known, OTHER if known == OTHER else self._values[known].name(value)


NO_DRAFT = "none"
"""Label value for the steps without a draft replica."""


class SpeculationInstruments:
    """Metrics of every verify step, by traffic label and by the draft replica whose candidates it had."""

    def __init__(self, make: Maker) -> None:
        self._tasks = Tasks()
        labels = ("task", "draft")
        self._steps = Bundle(
            MAX_DRAFTS,
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
            "replicas_desired", "Draft replicas that this orchestrator needs."
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
            "draft_lag_seconds", "Time from a verdict to the first block after it.", STEP_BUCKETS
        )


class OrchestratorInstruments:
    """Metrics of the orchestrator."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = Maker("outrider_orchestrator", registry)
        self.described = make.made
        self._admitted = make.counter("requests_admitted", "Requests admitted.")
        self.rejected = make.counter("requests_rejected", "Requests refused.", "reason")
        self._finished = make.counter("requests_finished", "Continuations ended.", "reason")
        self._tokens = make.counter("tokens", "Tokens generated.")
        self._queue_seconds = make.histogram("queue_seconds", "Time to admission.", FIRST_TOKEN_BUCKETS)
        self.requests = request_metrics(make)
        self.queued = make.gauge("requests_queued", "Requests that wait for admission.")
        self.running = make.gauge("requests_running", "Requests that run.")
        self.kv_utilization = make.gauge("kv_utilization", "Share of KV pages in use.")
        self.fallbacks = make.counter("fallbacks", "Times a request lost a replica.", "kind")
        self.kv_moves = make.counter("kv_moves", "Sessions that were to move.", "outcome")
        start_at_zero(self.kv_moves, ("moved", "recomputed"))
        self.replicas = make.gauge("replicas", "Known replicas.", "kind", "state")
        start_at_zero(self.rejected, REJECTIONS)
        start_at_zero(self._finished, ENDINGS)
        start_at_zero(self.fallbacks, ("draft", "verify"))
        self.speculation = SpeculationInstruments(make)
        self.draft_pool = DraftPoolInstruments(make)
        self.files = FileInstruments(make)
        self.labels = LabelInstruments(make)
        self.collected = make.counter("collected", "Continuations chosen to be collected.", "outcome")
        start_at_zero(self.collected, COLLECTED)
        self.shadows = ShadowInstruments(make)

    def admitted(self, waited: float) -> None:
        """Record that a request was admitted after `waited` seconds in the queue."""
        self._admitted.inc()
        self._queue_seconds.observe(waited)

    def finished(
        self,
        reason: str,
        tokens: int,
        seconds: float,
        ttft: float | None,
        tpot: float | None,
        trace_id: str = "",
        model: str = "",
    ) -> None:
        """Record the end of a continuation; `ttft` is None without a first token, `tpot` without a second."""
        exemplar = {"trace_id": trace_id} if trace_id else None
        self._finished.labels(reason).inc()
        self._tokens.inc(tokens)
        of = self.requests.of(model)
        of.seconds.observe(seconds, exemplar)
        if ttft is not None:
            of.first.observe(ttft, exemplar)
            of.output.observe(tokens)
        if tpot is not None:
            of.per_token.observe(tpot, exemplar)

    def prompt(self, model: str, tokens: int, cached: int) -> None:
        """Record that a request's prompt was read; `cached` of its tokens were in the cache."""
        of = self.requests.of(model)
        of.prompt.observe(tokens)
        of.cached.inc(cached)
