"""A real OTLP gRPC receiver that keeps what it is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class Span:
    """One received span; ids are in hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    events: tuple[str, ...]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves on a free port; `endpoint` is its address, `spans` what came."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, _context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Keep the spans."""
        for resource_spans in request.resource_spans:
            service = _attributes(resource_spans.resource.attributes).get("service.name", "")
            for scope_spans in resource_spans.scope_spans:
                self.spans += [_span(service, span) for span in scope_spans.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop(None)


def environment(endpoint: str) -> dict[str, str]:
    """Makes a process export to the collector, and only what a caller asked to be sampled."""
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{endpoint}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def new_traceparent(sampled: bool = True) -> tuple[str, str]:
    """A W3C trace context as a caller would send it, and its trace id."""
    trace_id = token_hex(16)
    return f"00-{trace_id}-{token_hex(8)}-{'01' if sampled else '00'}", trace_id


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        events=tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found
