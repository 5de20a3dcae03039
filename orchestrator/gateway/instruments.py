"""Metrics of the gateway, some also under the names that dashboards made for vLLM look for."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from outrider.client import Complete
from outrider.telemetry.file_instruments import FileInstruments
from outrider.telemetry.metric_parts import MAX_POSITION, Maker
from outrider.telemetry.request_metrics import DURATION_BUCKETS, FIRST_TOKEN_BUCKETS

GONE = 499
"""Status that is counted when the caller had gone before the answer began."""


class GatewayInstruments:
    """Counts requests by endpoint and status."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        make = Maker("outrider_gateway", registry)
        self.described = make.made
        """All metrics with names of our own."""
        self._finished = make.counter("requests", "Requests answered.", "endpoint", "status")
        self.aborted = make.counter("requests_aborted", "Requests whose caller had gone.")
        self.running = make.gauge("requests_running", "Requests that run.")
        self.first_text = make.histogram(
            "time_to_first_token_seconds", "Time to the first text.", FIRST_TOKEN_BUCKETS
        )
        self._seconds = make.histogram("request_seconds", "Time of a whole request.", DURATION_BUCKETS)
        self._tokens = make.counter("tokens", "Tokens of finished continuations.")
        self.files = FileInstruments(make)
        self._speculation = [
            (Counter(f"vllm:spec_decode_{name}", text, ["model_name"], registry=registry), key)
            for name, text, key in (
                ("num_drafts", "Steps that verified candidates; the name is vLLM's.", "drafts"),
                ("num_draft_tokens", "Candidates verified; the name is vLLM's.", "verified"),
                ("num_accepted_tokens", "Candidates accepted; the name is vLLM's.", "accepted"),
            )
        ]
        self._positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Candidates accepted, by their position from 0 on; the name is vLLM's.",
            ["model_name", "position"],
            registry=registry,
        )

    def finished(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that has ended. `status` is 0 when the caller went before the answer began."""
        self._finished.labels(endpoint, str(status or GONE)).inc()
        self._seconds.observe(seconds)

    def listed(self, model: str) -> None:
        """Begin the counts of a model's speculation with zero: clients that list the models before they send
        requests can then read what their own requests add."""
        for counter, _ in self._speculation:
            counter.labels(model)

    def completed(self, end: Complete) -> None:
        """Count a continuation that has ended."""
        self._tokens.inc(end.usage.completion_tokens)
        steps = end.accepted_histogram
        counts = {**end.speculation, "drafts": sum(steps)}
        for counter, key in self._speculation:
            counter.labels(end.model).inc(counts.get(key, 0))
        for position in range(min(len(steps) - 1, MAX_POSITION)):
            self._positions.labels(end.model, str(position)).inc(sum(steps[position + 1 :]))
