"""Metrics: what the methods count, and bounds on labels."""

from __future__ import annotations

import socket
import threading
import urllib.request
from contextlib import suppress
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from outrider.protocol.errors import ConfigError
from outrider.protocol.messages import StepTimes, Verdict
from outrider.rpc.reloading import Reloaded
from outrider.telemetry import metrics_page
from outrider.telemetry.instruments import DraftInstruments, OrchestratorInstruments, VerifyInstruments
from outrider.telemetry.metric_parts import MAX_POSITION, MAX_REPLICAS, MAX_TASKS
from outrider.telemetry.metrics_page import serve_metrics
from outrider.telemetry.shadow_instruments import Role

TIMES = StepTimes(queue_micros=3_000, forward_micros=20_000, sample_micros=1_000, idle_micros=2_000)
VERDICT = Verdict(1, 10, (5, 6, 7), verified=6, accepted=2, depth=4, hit=True, lookup_verified=1, times=TIMES)


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own for every test."""
    return CollectorRegistry()


def test_acceptance_is_counted_per_position(registry) -> None:
    """Four positions were verified and two accepted; ratios are left to the query."""
    VerifyInstruments(registry).verdict(VERDICT, "code")

    def at(name: str, position: int) -> float | None:
        labels = {"position": str(position), "task": "code"}
        return registry.get_sample_value(f"outrider_verify_position_{name}_total", labels)

    assert [at("verified", i) for i in range(1, 6)] == [1, 1, 1, 1, 0]
    assert [at("accepted", i) for i in range(1, 4)] == [1, 1, 0]
    assert registry.get_sample_value("outrider_verify_tokens_total", {"task": "code"}) == 3
    assert registry.get_sample_value("outrider_verify_hits_total", {"task": "code"}) == 1
    assert registry.get_sample_value("outrider_verify_lookup_nodes_verified_total") == 1


def test_pipeline_efficiency_follows_from_two_sums(registry) -> None:
    """A round lasts from verdict to verdict; the target worked on it for forward and choosing."""
    instruments = VerifyInstruments(registry)
    instruments.verdict(VERDICT, "code", first=True)
    for _ in range(2):
        instruments.verdict(VERDICT, "code")

    def seconds(name: str) -> float | None:
        return registry.get_sample_value(f"outrider_verify_round_{name}_total", {"task": "code"})

    assert seconds("seconds") == pytest.approx(2 * 0.024)
    assert seconds("busy_seconds") == pytest.approx(2 * 0.021)
    assert seconds("idle_seconds") == pytest.approx(2 * 0.002)


def test_estimates_are_compared_with_what_came(registry) -> None:
    """Per bucket of the estimate: nodes, the sum of their estimates, and how many the walk reached."""
    instruments = VerifyInstruments(registry)
    instruments.estimates([(0.72, True), (0.78, False), (1.0, True), (float("nan"), False)])

    def at(name: str, bucket: str) -> float | None:
        return registry.get_sample_value(f"outrider_verify_calibration_{name}_total", {"bucket": bucket})

    assert at("nodes", "0.7") == 2
    assert at("predicted", "0.7") == pytest.approx(1.5)
    assert at("accepted", "0.7") == 1
    assert (at("nodes", "0.9"), at("accepted", "0.9")) == (1, 1)
    assert (at("nodes", "0.0"), at("predicted", "0.0")) == (1, 0)


def test_steps_are_counted_by_draft_replica(registry) -> None:
    """The orchestrator knows who drafted; a step with nodes of a lookup alone had no draft."""
    speculation = OrchestratorInstruments(registry).speculation
    speculation.step(VERDICT, "code", "draft-1:7701")
    speculation.step(Verdict(2, 13, (5,), verified=1, lookup_verified=1), "code", "")
    here, none = ({"task": "code", "draft": draft} for draft in ("draft-1:7701", "none"))

    def value(name: str, labels: dict[str, str]) -> float | None:
        return registry.get_sample_value(f"outrider_orchestrator_{name}_total", labels)

    assert value("tokens_accepted", here) == 2
    assert (value("undrafted_steps", here), value("undrafted_steps", none)) == (0, 1)
    assert value("drifts", here) == 0


def test_traffic_labels_are_bounded(registry) -> None:
    """Neither callers who invent labels nor deep trees make the page grow without end."""
    instruments = VerifyInstruments(registry)
    deep = Verdict(1, 10, (1,), depth=500, accepted=500)
    for number in range(100):
        instruments.verdict(deep, f"task {number}")
    instruments.verdict(deep, "")
    steps = next(metric for metric in registry.collect() if metric.name == "outrider_verify_steps")
    tasks = {
        sample.labels["task"]: sample.value for sample in steps.samples if sample.name.endswith("_total")
    }
    assert len(tasks) == MAX_TASKS + 2
    assert (tasks["other"], tasks["none"]) == (100 - MAX_TASKS, 1)
    positions = next(
        metric for metric in registry.collect() if metric.name == "outrider_verify_position_accepted"
    )
    assert {int(sample.labels["position"]) for sample in positions.samples} == set(range(1, MAX_POSITION + 1))


def test_a_replica_that_is_gone_makes_room(registry) -> None:
    """Pods come and go under new addresses: the newest are counted, the oldest series end."""
    speculation = OrchestratorInstruments(registry).speculation
    for number in range(MAX_REPLICAS * 5):
        speculation.step(VERDICT, "code", f"10.0.0.{number}:7701")
    drafts = {
        sample.labels["draft"]
        for metric in registry.collect()
        for sample in metric.samples
        if "draft" in sample.labels
    }
    assert len(drafts) <= MAX_REPLICAS * 4
    assert f"10.0.0.{MAX_REPLICAS * 5 - 1}:7701" in drafts
    assert "10.0.0.0:7701" not in drafts


def test_the_page_is_asked_for_device_memory(registry) -> None:
    """Free memory is read when the page is, not when it was announced."""
    free = [10]
    VerifyInstruments(registry).capacity.set(32, lambda: (free[0], 100))
    free[0] = 7
    assert registry.get_sample_value("outrider_verify_device_memory_free_bytes") == 7
    assert registry.get_sample_value("outrider_verify_device_memory_bytes") == 100
    assert registry.get_sample_value("outrider_verify_session_limit") == 32


def test_utilization_is_a_share(registry) -> None:
    """What an inference gateway reads: used pages, neither free nor kept for reuse, as a share of all."""
    VerifyInstruments(registry).pages.set(100, 40, 20)
    assert registry.get_sample_value("outrider_verify_kv_utilization") == 0.4
    assert registry.get_sample_value("outrider_verify_pages_free") == 40


def use_everything(registry: CollectorRegistry) -> None:
    """Move every metric of every service."""
    verify, draft, orchestrator = (
        kind(registry) for kind in (VerifyInstruments, DraftInstruments, OrchestratorInstruments)
    )
    verify.capacity.set(32, lambda: (1, 2))
    verify.verdict(VERDICT, "")
    verify.estimates([(0.5, True)])
    verify.step(12, 3, 0.02)
    verify.pages.set(100, 40, 20)
    verify.sessions.set(3)
    verify.queued.set(1)
    verify.idle.inc(0.5)
    verify.preempted.inc()
    verify.without_memory.inc()
    verify.stale_handles.labels("incarnation").inc()
    verify.nodes_dropped.inc(4)
    draft.capacity.set(32, lambda: (1, 2))
    draft.step(2, 0.003)
    draft.nodes.inc("", 3)
    draft.lag.observe(0.002)
    draft.starved.inc("", True)
    draft.wasted.inc("", 5)
    draft.sessions.set(2)
    draft.pages.set(100, 1, 2)
    draft.weights("0a1b2c3d")
    orchestrator.admitted(0.5)
    orchestrator.rejected.labels("OVERLOADED").inc()
    orchestrator.finished("stop", 20, 1.0, 0.05, 0.01, trace_id="a" * 32, model="m")
    orchestrator.prompt("m", 12, 4)
    orchestrator.requests.of("m").gap.observe(0.02)
    orchestrator.queued.set(1)
    orchestrator.running.set(2)
    orchestrator.kv_utilization.set(0.5)
    orchestrator.fallbacks.labels("draft").inc()
    orchestrator.kv_moves.labels("moved").inc()
    orchestrator.labels.finished({"team": "search"}, 20)
    orchestrator.replicas.labels("draft", "ready").set(2)
    orchestrator.collected.labels("written").inc()
    orchestrator.shadows.compared("", "0a1b2c3d", Role.SHADOW, tokens=3, proposed=2, foreseen=1)
    orchestrator.shadows.failed("UNAVAILABLE")
    orchestrator.shadows.promoted()
    orchestrator.shadows.replicas([("draft-1:7701", "0a1b2c3d", Role.SERVING)])
    orchestrator.speculation.step(VERDICT, "", "draft-1:7701")
    orchestrator.speculation.step(Verdict(2, 13, (5,)), "", "")
    orchestrator.speculation.drift("", "draft-1:7701", 0.4, alarm=True)
    pool = orchestrator.draft_pool
    for gauge in (pool.wanted, pool.waiting, pool.slots, pool.per_replica, pool.replicas_desired):
        gauge.set(1)
    for counter in (pool.parkings, pool.wanted_seconds, pool.missing_seconds, pool.idle_seconds):
        counter.inc(0.1)
    pool.lag_seconds.observe(0.001)
    for service in (verify, draft, orchestrator):
        certificate = Reloaded("server_certificate", {}, lambda _: SimpleNamespace(expires=2e9))
        service.files.watch([certificate])
        certificate.on_refused(certificate.name)


def test_every_event_of_every_service_is_counted(registry) -> None:
    """Each event moves a metric of its own service; every metric says what it is."""
    use_everything(registry)
    for metric in registry.collect():
        assert metric.documentation.endswith("."), metric.name
        assert metric.name.startswith(("outrider_verify_", "outrider_draft_", "outrider_orchestrator_"))
        assert any(sample.value for sample in metric.samples), metric.name
        assert not any(sample.name.endswith("_created") for sample in metric.samples), metric.name


@pytest.mark.parametrize("kind", [VerifyInstruments, DraftInstruments, OrchestratorInstruments])
def test_descriptions_are_what_is_exported(registry, kind) -> None:
    """Every metric is described under the name, type and labels that it has on the page."""
    described = {entry.name: (entry.kind, entry.text) for entry in kind(registry).described}
    exported = {
        metric.name + ("_total" if metric.type == "counter" else ""): (metric.type, metric.documentation)
        for metric in registry.collect()
    }
    assert described == exported


def test_the_page_is_served(registry) -> None:
    """`serve_metrics` answers on the port it returns."""
    VerifyInstruments(registry).sessions.set(3)
    port = serve_metrics(0, "127.0.0.1", registry)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert "outrider_verify_sessions 3.0" in page


def test_a_taken_metrics_port_is_a_setting_to_change() -> None:
    """The process stops at start and names the setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}"):
            serve_metrics(port, "127.0.0.1", CollectorRegistry())


def test_scrapers_that_hold_on_are_few(monkeypatch) -> None:
    """Connections that say nothing take the places there are; further ones are closed, until some end."""
    monkeypatch.setattr(metrics_page, "MAX_SCRAPES", 2)
    port = serve_metrics(0, "127.0.0.1", CollectorRegistry())
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2)]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as third:
        assert third.recv(1) == b""
    for connection in silent:
        connection.close()
    for _ in range(1000):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10):
            return
    raise AssertionError("the places are never free again")


def test_a_scraper_that_keeps_sending_does_not_keep_its_place(monkeypatch) -> None:
    """The whole scrape has a longest time, however often a part of the request comes."""
    monkeypatch.setattr(metrics_page, "SCRAPE_SECONDS", 0)
    port = serve_metrics(0, "127.0.0.1", CollectorRegistry())
    with socket.create_connection(("127.0.0.1", port), timeout=8) as slow:
        slow.sendall(b"GET /met")
        assert slow.recv(1) == b""


def test_a_scrape_that_gets_no_thread_frees_its_place(monkeypatch) -> None:
    """When the machine has room for threads again, the page is served."""

    def full(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(metrics_page, "MAX_SCRAPES", 2)
    port = serve_metrics(0, "127.0.0.1", CollectorRegistry())
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", full)
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as refused:
                assert refused.recv(1) == b""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        assert page.status == 200
