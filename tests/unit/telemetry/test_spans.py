"""Spans after the fact: ids, parents, links, times; nothing when a request is not sampled."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from outrider.protocol.errors import ConfigError
from outrider.telemetry import spans

INCOMING = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _request(traceparent: str, incoming: str = "", **options: object) -> None:
    fields = {"start_ns": 1_000, "end_ns": 9_000, "attributes": {"gen_ai.request.max_tokens": 4}, **options}
    spans.record_request(traceparent, "generate", incoming=incoming, **fields)


def test_one_trace_over_two_services(exporter: InMemorySpanExporter) -> None:
    """A step's span and its children fit together although each side records on its own."""
    request = spans.start_request("generate", INCOMING, {})
    step = spans.step_traceparent(request, 3)
    block = spans.record_span("draft.expand", parent=step, start_ns=1_500, end_ns=1_900, attributes={})
    forward = spans.record_span(
        "verify.forward",
        parent=step,
        start_ns=2_000,
        end_ns=3_000,
        attributes={"nodes": 5},
        links=[block, ""],
    )
    recorded = spans.record_span(
        "speculation.step",
        parent=request,
        start_ns=1_400,
        end_ns=3_100,
        attributes={},
        links=[block],
        span_id=spans.step_span_id(request, 3),
    )
    _request(request, INCOMING)
    draft_expand, verify_forward, speculation_step, generate = exporter.get_finished_spans()
    assert recorded == step
    assert generate.parent.span_id == 0xB7AD6B7169203331
    assert speculation_step.parent.span_id == generate.context.span_id
    assert verify_forward.parent.span_id == draft_expand.parent.span_id == speculation_step.context.span_id
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {
        0x0AF7651916CD43DD8448EB211C80319C
    }
    assert [link.context.span_id for link in verify_forward.links] == [draft_expand.context.span_id]
    assert forward.split("-")[2] == f"{verify_forward.context.span_id:016x}"
    assert (verify_forward.start_time, verify_forward.end_time) == (2_000, 3_000)
    assert verify_forward.attributes == {"nodes": 5}
    assert generate.resource.attributes["service.name"] == "outrider-verify"
    assert generate.resource.attributes["service.instance.id"] == "verify-0"


def test_a_request_without_context_begins_a_trace(exporter: InMemorySpanExporter) -> None:
    """No traceparent, or one that is garbage, is no reason to lose the trace."""
    for incoming in ("", "garbage", "00-zz-zz-01", f"00-{'0' * 32}-{'0' * 16}-01"):
        _request(spans.start_request("generate", incoming, {}), incoming)
    recorded = exporter.get_finished_spans()
    assert [span.parent for span in recorded] == [None] * 4
    assert len({span.context.trace_id for span in recorded}) == 4


def test_errors_and_events_are_on_the_span(exporter: InMemorySpanExporter) -> None:
    """A failed request says so, and a step says what was noticed in it."""
    request = spans.start_request("generate", "", {})
    events = [("drift", 5_000, {"steps": 300})]
    spans.record_span("step", parent=request, start_ns=1, end_ns=2, attributes={}, events=events)
    _request(request, error="NO_REPLICA")
    step, span = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "NO_REPLICA"
    assert (step.events[0].name, step.events[0].timestamp) == ("drift", 5_000)


def test_the_callers_sampling_decision_counts(exporter: InMemorySpanExporter) -> None:
    """A caller that does not sample gets no spans anywhere: every traceparent below is empty."""
    request = spans.start_request("generate", INCOMING[:-2] + "00", {})
    step = spans.step_traceparent(request, 1)
    block = spans.record_span("draft.expand", parent=step, start_ns=1, end_ns=2, attributes={})
    _request(request)
    assert (request, step, block) == ("", "", "")
    assert exporter.get_finished_spans() == ()


def test_nothing_is_recorded_when_tracing_is_off() -> None:
    """Without an exporter a request is not sampled, whatever its caller says."""
    assert spans.start_request("generate", INCOMING, {}) == ""
    assert spans.record_span("x", parent=INCOMING, start_ns=1, end_ns=2, attributes={}) == ""


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [("", False), (INCOMING, True), (INCOMING[:-2] + "03", True), (INCOMING[:-2] + "00", False)],
)
def test_is_sampled_reads_the_flag(traceparent: str, sampled: bool) -> None:
    """The lowest bit of the flags decides; newer bits do not confuse it."""
    assert spans.is_sampled(traceparent) is sampled


def test_step_spans_have_ids_of_their_own() -> None:
    """Steps of one request and equal steps of two requests never share an id."""
    other = INCOMING.replace("b7ad", "c7ad")
    ids = {spans.step_span_id(request, step) for request in (INCOMING, other) for step in range(200)}
    assert len(ids) == 400


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
    ],
)
def test_the_standard_variables_decide(
    environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export happens exactly when the OTEL_* variables ask for something that we can do."""
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spans.configure_tracing("verify", "verify-0")
    assert (spans.start_request("generate", INCOMING, {}) != "") is wanted
    spans.shutdown_tracing()


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, with what to set: whoever asked for traces would look for them in vain."""
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    monkeypatch.setenv(name, "http/protobuf")
    with pytest.raises(ConfigError, match="'http/protobuf' is not supported; set grpc, and an endpoint"):
        spans.configure_tracing("verify", "verify-0")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    spans.configure_tracing("verify", "verify-0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_ATTRIBUTE_COUNT_LIMIT", "-1"),
    ],
)
def test_a_wrong_value_is_one_sentence(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, with the names of the variables that may be at fault."""
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^tracing: .*; correct that value among .*{name}"):
        spans.configure_tracing("verify", "verify-0")


def test_the_sampler_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_TRACES_SAMPLER` samples requests that bring no decision of their own."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    spans.use_processor("verify", "verify-0", SimpleSpanProcessor(InMemorySpanExporter()))
    assert spans.start_request("generate", "", {}) == ""
    assert spans.start_request("generate", INCOMING, {}) != ""
    spans.shutdown_tracing()
