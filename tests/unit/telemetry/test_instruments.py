"""Metrics: what the methods count, and bounds on labels."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from outrider.errors import ConfigError
from outrider.messages import Verdict
from outrider.telemetry.instruments import (
    MAX_POSITION,
    MAX_TASKS,
    DraftInstruments,
    OrchestratorInstruments,
    VerifyInstruments,
    start_metrics,
)

VERDICT = Verdict(1, 10, (5, 6, 7), verified=6, accepted=2, depth=4, hit=True, lookup_verified=1)


def test_acceptance_is_counted_per_position() -> None:
    """Four positions were verified and two accepted; ratios are left to the query."""
    registry = CollectorRegistry()
    VerifyInstruments(registry).verdict(VERDICT, "code")

    def at(name: str, position: int) -> float | None:
        labels = {"position": str(position), "task": "code"}
        return registry.get_sample_value(f"outrider_verify_position_{name}_total", labels)

    assert [at("verified", i) for i in range(1, 6)] == [1, 1, 1, 1, None]
    assert [at("accepted", i) for i in range(1, 4)] == [1, 1, None]
    assert registry.get_sample_value("outrider_verify_tokens_total", {"task": "code"}) == 3
    assert registry.get_sample_value("outrider_verify_hits_total", {"task": "code"}) == 1
    assert registry.get_sample_value("outrider_verify_lookup_nodes_verified_total") == 1


def test_labels_are_bounded() -> None:
    """Neither callers who invent labels nor deep trees make the page grow without end."""
    registry = CollectorRegistry()
    instruments = VerifyInstruments(registry)
    deep = Verdict(1, 10, (1,), depth=500, accepted=500)
    for number in range(100):
        instruments.verdict(deep, f"task {number}")
    steps = next(metric for metric in registry.collect() if metric.name == "outrider_verify_steps")
    tasks = {
        sample.labels["task"]: sample.value for sample in steps.samples if sample.name.endswith("_total")
    }
    assert len(tasks) == MAX_TASKS + 1
    assert tasks["other"] == 100 - MAX_TASKS
    positions = next(
        metric for metric in registry.collect() if metric.name == "outrider_verify_position_accepted"
    )
    assert {int(sample.labels["position"]) for sample in positions.samples} == set(range(1, MAX_POSITION + 1))


def test_every_event_of_every_service_is_counted() -> None:
    """Each method moves a metric of its own service; every metric says what it is."""
    registry = CollectorRegistry()
    verify, draft, orchestrator = (
        kind(registry) for kind in (VerifyInstruments, DraftInstruments, OrchestratorInstruments)
    )
    verify.verdict(VERDICT, "")
    verify.step(12, 3, 0.02)
    verify.pages(100, 40, 20)
    verify.sessions(3)
    verify.queued(1)
    verify.idle(0.5)
    verify.preempted()
    verify.stale_handle("incarnation")
    verify.nodes_dropped(4)
    draft.expanded(8, 2, 0.003)
    draft.block(8)
    draft.verdict(VERDICT, "")
    draft.wasted(5)
    draft.sessions(2)
    draft.pages(100, 1, 2)
    orchestrator.admitted()
    orchestrator.rejected("OVERLOADED")
    orchestrator.finished("stop", 20, 1.0, 0.05, 0.01, trace_id="a" * 32)
    orchestrator.queued(1)
    orchestrator.running(2)
    orchestrator.fallback("draft")
    orchestrator.replicas("draft", "ready", 2)
    orchestrator.step(VERDICT)
    for metric in registry.collect():
        assert metric.documentation.endswith("."), metric.name
        assert metric.name.startswith(("outrider_verify_", "outrider_draft_", "outrider_orchestrator_"))
        values = [sample.value for sample in metric.samples if not sample.name.endswith("_created")]
        assert any(values), metric.name


def test_the_page_is_served() -> None:
    """`start_metrics` answers on the port it returns."""
    registry = CollectorRegistry()
    VerifyInstruments(registry).sessions(3)
    port = start_metrics(0, "127.0.0.1", registry)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert "outrider_verify_sessions 3.0" in page


def test_a_taken_metrics_port_is_a_setting_to_change() -> None:
    """The process stops at start and names the setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"):
            start_metrics(port, "127.0.0.1", CollectorRegistry())
