"""Every Prometheus metric of the project, by service. Counters are raw; ratios are for the query.

Acceptance rate at position i: `..._position_accepted_total` / `..._position_verified_total`.
Acceptance length: `..._tokens_total` / `..._steps_total`. Hit rate: `..._hits_total` / `..._steps_total`.

Labels are bounded: positions at `MAX_POSITION`, traffic labels ("task") at `MAX_TASKS` values, then "other".
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from outrider.errors import ConfigError
from outrider.messages import Verdict

MAX_POSITION = 16
MAX_TASKS = 32

DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""Those of the gen_ai conventions, and three below: a pipelined token takes less than 10 ms."""
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def start_metrics(port: int, host: str = "0.0.0.0", registry: CollectorRegistry = REGISTRY) -> int:
    """Serve /metrics from a thread; returns the port (0 picks a free one).

    Raises:
        ConfigError: the port cannot be bound.
    """
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"metrics_port: cannot listen on {host}:{port} ({error.strerror})") from error
    return int(server.server_port)


class VerifyInstruments:
    """Metrics of the verify service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = _Maker("outrider_verify", registry)
        self._acceptance = _Acceptance(make)
        self._verified = _ByTask(make.counter("nodes_verified", "Candidate nodes verified.", "task"))
        self._lookup = make.counter("lookup_nodes_verified", "Verified nodes that came from prompt lookup.")
        self._step_seconds = make.histogram("step_seconds", "Time of a verify step.", STEP_BUCKETS)
        self._step_tokens = make.histogram("step_tokens", "Tokens of a verify step's forward.", SIZE_BUCKETS)
        self._step_sessions = make.histogram("step_sessions", "Sessions of a verify step.", SIZE_BUCKETS)
        self._idle = make.counter("idle_seconds", "Time in which no step ran although sessions were open.")
        self._sessions = make.gauge("sessions", "Open sessions.")
        self._queued = make.gauge("queued_sessions", "Sessions that wait for pages or for their prefill.")
        self._pages = _Pages(make)
        self._preempted = make.counter("preemptions", "Sessions paused because no KV page was left.")
        self._stale = make.counter("stale_handles", "KV handles refused, by reason.", "reason")
        self._dropped = make.counter("nodes_dropped", "Proposed nodes that were stale when they came.")

    def verdict(self, verdict: Verdict, task: str) -> None:
        """A step committed tokens for one session."""
        self._acceptance.count(task, len(verdict.tokens), verdict.accepted, verdict.depth, verdict.hit)
        self._verified.inc(task, verdict.verified)
        if verdict.lookup_verified:
            self._lookup.inc(verdict.lookup_verified)

    def step(self, tokens: int, sessions: int, seconds: float) -> None:
        """One forward ran."""
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(tokens)
        self._step_sessions.observe(sessions)

    def idle(self, seconds: float) -> None:
        """The engine had open sessions and ran no step for this long."""
        self._idle.inc(seconds)

    def sessions(self, count: int) -> None:
        """Open sessions now."""
        self._sessions.set(count)

    def queued(self, count: int) -> None:
        """Waiting sessions now."""
        self._queued.set(count)

    def pages(self, total: int, used: int, cached: int) -> None:
        """KV pages now."""
        self._pages.set(total, used, cached)

    def preempted(self) -> None:
        """A session was paused for want of pages."""
        self._preempted.inc()

    def stale_handle(self, reason: str) -> None:
        """A KV handle was refused."""
        self._stale.labels(reason).inc()

    def nodes_dropped(self, count: int) -> None:
        """Proposed nodes were stale when they came."""
        self._dropped.inc(count)


class DraftInstruments:
    """Metrics of the draft service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = _Maker("outrider_draft", registry)
        self._acceptance = _Acceptance(make)
        self._seconds = make.histogram("step_seconds", "Time of a draft forward with ranking.", STEP_BUCKETS)
        self._expanded = make.histogram("step_nodes", "Nodes expanded in a draft forward.", SIZE_BUCKETS)
        self._step_sessions = make.histogram("step_sessions", "Sessions of a draft forward.", SIZE_BUCKETS)
        self._blocks = make.counter("blocks", "Token blocks sent.")
        self._nodes = make.counter("nodes", "Nodes sent in token blocks.")
        self._wasted = make.counter("nodes_wasted", "Nodes dropped because the target went elsewhere.")
        self._sessions = make.gauge("sessions", "Open sessions.")
        self._pages = _Pages(make)

    def expanded(self, nodes: int, sessions: int, seconds: float) -> None:
        """One draft forward ran."""
        self._seconds.observe(seconds)
        self._expanded.observe(nodes)
        self._step_sessions.observe(sessions)

    def block(self, nodes: int) -> None:
        """A token block was sent."""
        self._blocks.inc()
        self._nodes.inc(nodes)

    def verdict(self, verdict: Verdict, task: str) -> None:
        """A verdict came back for one session."""
        self._acceptance.count(task, len(verdict.tokens), verdict.accepted, verdict.depth, verdict.hit)

    def wasted(self, nodes: int) -> None:
        """A re-rooting dropped nodes."""
        self._wasted.inc(nodes)

    def sessions(self, count: int) -> None:
        """Open sessions now."""
        self._sessions.set(count)

    def pages(self, total: int, used: int, cached: int) -> None:
        """KV pages now."""
        self._pages.set(total, used, cached)


class OrchestratorInstruments:
    """Metrics of the orchestrator."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = _Maker("outrider_orchestrator", registry)
        self._admitted = make.counter("requests_admitted", "Requests admitted.")
        self._rejected = make.counter("requests_rejected", "Requests refused, by reason.", "reason")
        self._finished = make.counter("requests_finished", "Requests ended, by reason.", "reason")
        self._tokens = make.counter("tokens", "Tokens generated.")
        self._seconds = make.histogram("request_seconds", "Time from admission to end.", DURATION_BUCKETS)
        self._first = make.histogram(
            "time_to_first_token_seconds", "Time from admission to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._per_token = make.histogram(
            "time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_BUCKETS
        )
        self._queued = make.gauge("requests_queued", "Requests that wait for admission.")
        self._running = make.gauge("requests_running", "Requests that run.")
        self._fallbacks = make.counter("fallbacks", "Times a request went on without a replica.", "kind")
        self._replicas = make.gauge("replicas", "Known replicas.", "kind", "state")
        self._steps = make.counter("steps", "Verify steps of all requests.")
        self._accepted = make.counter("tokens_accepted", "Tokens committed because a node matched.")
        self._hits = make.counter("hits", "Steps whose bonus token was already a candidate.")

    def admitted(self) -> None:
        """A request was admitted."""
        self._admitted.inc()

    def rejected(self, reason: str) -> None:
        """A request was refused; the reason is an error's `reason`."""
        self._rejected.labels(reason).inc()

    def finished(
        self,
        reason: str,
        tokens: int,
        seconds: float,
        ttft: float | None,
        tpot: float | None,
        trace_id: str = "",
    ) -> None:
        """A request ended; the times are None when it had no first or no second token."""
        exemplar = {"trace_id": trace_id} if trace_id else None
        self._finished.labels(reason).inc()
        self._tokens.inc(tokens)
        self._seconds.observe(seconds, exemplar)
        if ttft is not None:
            self._first.observe(ttft, exemplar)
        if tpot is not None:
            self._per_token.observe(tpot, exemplar)

    def step(self, verdict: Verdict) -> None:
        """A verdict arrived."""
        self._steps.inc()
        self._accepted.inc(verdict.accepted)
        self._hits.inc(verdict.hit)

    def queued(self, count: int) -> None:
        """Waiting requests now."""
        self._queued.set(count)

    def running(self, count: int) -> None:
        """Running requests now."""
        self._running.set(count)

    def fallback(self, kind: str) -> None:
        """A request lost a replica of a kind ("draft" or "verify") and went on."""
        self._fallbacks.labels(kind).inc()

    def replicas(self, kind: str, state: str, count: int) -> None:
        """Replicas of a kind ("draft" or "verify") in a state such as "ready", "down" or "open"."""
        self._replicas.labels(kind, state).set(count)


class _Maker:
    """Makes metrics with a common prefix in one registry."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self.prefix = prefix
        self.registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{self.prefix}_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{self.prefix}_{name}", text, buckets=buckets, registry=self.registry)


class _ByTask:
    """Counter children by task: one lookup in a dict on the hot path, few values in all."""

    def __init__(self, counter: Counter, **labels: str) -> None:
        self._counter = counter
        self._labels = labels
        self._children: dict[str, Counter] = {}

    def inc(self, task: str, amount: float) -> None:
        child = self._children.get(task)
        if child is None:
            child = self._bind(task)
        child.inc(amount)

    def _bind(self, task: str) -> Counter:
        if len(self._children) >= MAX_TASKS:
            return self._counter.labels(task="other", **self._labels)
        child = self._counter.labels(task=task, **self._labels)
        self._children[task] = child
        return child


class _Acceptance:
    """Raw counts from which acceptance rate, acceptance length and hit rate follow."""

    def __init__(self, make: _Maker) -> None:
        self._steps = _ByTask(make.counter("steps", "Session steps.", "task"))
        self._tokens = _ByTask(make.counter("tokens", "Tokens committed.", "task"))
        self._hits = _ByTask(make.counter("hits", "Steps whose bonus token was already a candidate.", "task"))
        verified = make.counter(
            "position_verified", "Session steps that verified candidates this deep.", "position", "task"
        )
        accepted = make.counter(
            "position_accepted", "Session steps that accepted a candidate this deep.", "position", "task"
        )
        self._verified = [_ByTask(verified, position=str(i)) for i in range(1, MAX_POSITION + 1)]
        self._accepted = [_ByTask(accepted, position=str(i)) for i in range(1, MAX_POSITION + 1)]

    def count(self, task: str, tokens: int, accepted: int, depth: int, hit: bool) -> None:
        self._steps.inc(task, 1)
        self._tokens.inc(task, tokens)
        if hit:
            self._hits.inc(task, 1)
        for position in self._verified[:depth]:
            position.inc(task, 1)
        for position in self._accepted[:accepted]:
            position.inc(task, 1)


class _Pages:
    def __init__(self, make: _Maker) -> None:
        self._total = make.gauge("pages", "KV pages in all.")
        self._used = make.gauge("pages_used", "KV pages that sessions or leases hold.")
        self._cached = make.gauge("pages_cached", "KV pages kept for reuse; reclaimed when needed.")

    def set(self, total: int, used: int, cached: int) -> None:
        self._total.set(total)
        self._used.set(used)
        self._cached.set(cached)
