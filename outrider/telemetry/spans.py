"""Spans, recorded after the fact with explicit times and with parents as W3C `traceparent` strings.

Nothing runs on the hot path: a request that is not sampled has the empty traceparent, for which every
function here returns at once; a sampled one hands finished spans to a batch processor.

Exporting follows the standard variables: spans go to OTLP over gRPC when `OTEL_EXPORTER_OTLP_ENDPOINT` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set (or `OTEL_TRACES_EXPORTER=otlp`), unless `OTEL_SDK_DISABLED` or
`OTEL_TRACES_EXPORTER=none` forbids it; `OTEL_TRACES_SAMPLER` decides for which requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from outrider.protocol.errors import ConfigError

__all__ = [
    "SpanKind",
    "child_traceparent",
    "configure_tracing",
    "is_sampled",
    "record_request",
    "record_span",
    "shutdown_tracing",
    "start_request",
    "step_span_id",
    "step_traceparent",
    "use_processor",
]

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Attribute]
SCOPE = InstrumentationScope("outrider")
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Recorder(NamedTuple):
    provider: TracerProvider
    processor: SpanProcessor


_recorder: _Recorder | None = None


def configure_tracing(service_name: str, replica: str) -> None:
    """Record spans as `outrider-<service_name>` when the OTEL_* variables ask for it.

    Raises:
        ConfigError: they ask for a protocol other than gRPC, or one has a wrong value.
    """
    if not _export_wanted(os.environ):
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    try:
        use_processor(service_name, replica, BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # the library has no class for wrong values, and does not always name them
        names = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        raise ConfigError(f"tracing: {error}; correct that value among {names}") from error


def use_processor(service_name: str, replica: str, processor: SpanProcessor) -> None:
    """Record spans with `processor`; `configure_tracing` gives it one that exports."""
    global _recorder
    identity = {"service.name": f"outrider-{service_name}", "service.instance.id": replica}
    provider = TracerProvider(resource=Resource.create(identity), shutdown_on_exit=False)
    _recorder = _Recorder(provider, processor)


def shutdown_tracing() -> None:
    """Export what is still buffered and stop recording."""
    global _recorder
    ended, _recorder = _recorder, None
    if ended is not None:
        ended.processor.shutdown()


def is_sampled(traceparent: str) -> bool:
    """Whether spans below `traceparent` are recorded."""
    return traceparent != "" and traceparent[-1] in "13579bdf"


def start_request(name: str, incoming: str, attributes: Attributes) -> str:
    """The traceparent of a new request's span, or "" if it is not sampled.

    `incoming` is the caller's traceparent. If it is valid, the span is its child and its sampling flag counts
    (as `OTEL_TRACES_SAMPLER` says); otherwise a new trace begins. `record_request` records the span.
    """
    if _recorder is None:
        return ""
    parent = _parse(incoming)
    trace_id = parent.trace_id if parent else random.getrandbits(128)
    context = trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent else None
    sampler = _recorder.provider.sampler
    result = sampler.should_sample(context, trace_id, name, SpanKind.SERVER, dict(attributes))
    if result.decision is not Decision.RECORD_AND_SAMPLE:
        return ""
    return _format(trace_id, random.getrandbits(64))


def record_request(
    traceparent: str,
    name: str,
    *,
    incoming: str,
    start_ns: int,
    end_ns: int,
    attributes: Attributes,
    error: str = "",
) -> None:
    """Record the span that `start_request` announced."""
    context = _parse(traceparent)
    if _recorder is None or context is None:
        return
    times = (start_ns, end_ns)
    _record(context, _parse(incoming), name, times, attributes, SpanKind.SERVER, error)


def record_span(
    name: str,
    *,
    parent: str,
    start_ns: int,
    end_ns: int,
    attributes: Attributes,
    links: Sequence[str] = (),
    span_id: int | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    error: str = "",
    events: Sequence[tuple[str, int, Attributes]] = (),
) -> str:
    """Record a finished span below `parent`; returns its traceparent, "" if it is not sampled.

    `links` are traceparents of related spans (empty ones are skipped); `span_id` is its id, random if None;
    `events` are (name, time in ns, attributes).
    """
    if _recorder is None or not is_sampled(parent):
        return ""
    parent_context = _parse(parent)
    if parent_context is None:
        return ""
    span_id = span_id or random.getrandbits(64) or 1
    context = SpanContext(parent_context.trace_id, span_id, is_remote=False, trace_flags=SAMPLED)
    _record(context, parent_context, name, (start_ns, end_ns), attributes, kind, error, events, links)
    return child_traceparent(parent, span_id)


def step_span_id(request_traceparent: str, step: int) -> int:
    """The id of the `speculation.step` span of one step, derived so that every service knows it."""
    digest = blake2b(f"{request_traceparent[36:52]}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


def step_traceparent(request_traceparent: str, step: int) -> str:
    """The traceparent of the `speculation.step` span of one step; "" when the request is not sampled."""
    if not is_sampled(request_traceparent):
        return ""
    return child_traceparent(request_traceparent, step_span_id(request_traceparent, step))


def child_traceparent(parent: str, span_id: int) -> str:
    """The traceparent of a span of the same trace."""
    return f"{parent[:36]}{span_id:016x}{parent[52:]}"


def _record(
    context: SpanContext,
    parent: SpanContext | None,
    name: str,
    times: tuple[int, int],
    attributes: Attributes,
    kind: SpanKind,
    error: str,
    events: Sequence[tuple[str, int, Attributes]] = (),
    links: Sequence[str] = (),
) -> None:
    assert _recorder is not None
    linked = [Link(target) for target in map(_parse, links) if target is not None]
    span = ReadableSpan(
        name,
        context=context,
        parent=parent,
        resource=_recorder.provider.resource,
        attributes=dict(attributes),
        events=[Event(title, dict(fields), timestamp=time) for title, time, fields in events],
        links=linked,
        kind=kind,
        status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
        start_time=times[0],
        end_time=times[1],
        instrumentation_scope=SCOPE,
    )
    _recorder.processor.on_end(span)


def _format(trace_id: int, span_id: int) -> str:
    return f"00-{trace_id:032x}-{span_id or 1:016x}-01"


def _parse(traceparent: str) -> SpanContext | None:
    """The span context of a W3C traceparent; None when it is not a valid one."""
    parts = traceparent.split("-")
    if [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return None
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:4])
    except ValueError:
        return None
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid else None


def _export_wanted(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter not in ("", "otlp"):
        return False
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    if not endpoint and exporter != "otlp":
        return False
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol and protocol != "grpc":
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not supported; set grpc, and an endpoint "
            "that receives it, on port 4317 by default"
        )
    return True
