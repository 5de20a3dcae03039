"""Our message of spans is the one that the SDK would make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.telemetry import spans
from outrider.telemetry.otlp import SpanExporter, request_of

PARENT = f"00-{1:032x}-{2:016x}-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Recording is on; what is recorded lands here."""
    memory = InMemorySpanExporter()
    spans.use_processor("verify", "verify-0", SimpleSpanProcessor(memory))
    yield memory
    spans.shutdown_tracing()


def test_the_message_is_that_of_the_sdk(exporter: InMemorySpanExporter) -> None:
    """Of a root, of a child with everything that a span can have, and of one that failed."""
    root = spans.start_request("generate", "", {})
    spans.record_request(root, "generate", incoming="", start_ns=1, end_ns=9, attributes={})
    every_kind = {"text": "é", "yes": True, "no": False, "count": 3, "negative": -3, "share": 0.5}
    block = spans.record_span("draft.expand", parent=root, start_ns=2, end_ns=3, attributes=every_kind)
    spans.record_span(
        "speculation.step",
        parent=root,
        start_ns=2,
        end_ns=4,
        attributes={"texts": ["a", "b"], "numbers": [1, 2], "none": []},
        links=[block, root],
        events=[("outrider.drift", 3, {"outrider.drift.steps": 900})],
        kind=spans.SpanKind.CLIENT,
    )
    spans.record_span("x", parent=PARENT, start_ns=1, end_ns=2, attributes={}, error="UNAVAILABLE")
    finished = exporter.get_finished_spans()
    assert request_of(finished) == encode_spans(finished)


def test_the_exporter_uses_it() -> None:
    """The SDK still calls what we put in the place of its own."""
    assert SpanExporter._translate_data is not OTLPSpanExporter._translate_data
    assert "_translate_data" in vars(OTLPSpanExporter)
