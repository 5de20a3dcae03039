"""Measures what a span costs: recording one of a step, and encoding it for export, which another thread does.

    python -m benchmarks.tracing

Processor time of one thread, the least of some tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks import machine
from outrider.telemetry import spans
from scripts.console import new_parser, run

SPANS, TRIES = 300, 15
PARENT = f"00-{1:032x}-{2:016x}-01"
ATTRIBUTES = {f"outrider.step.attribute_{number}": number for number in range(12)}


def main() -> int:
    """Measure and print."""
    new_parser(__doc__).parse_args()
    memory = InMemorySpanExporter()
    spans.use_processor("verify", "verify-0", SimpleSpanProcessor(memory))

    def record() -> None:
        memory.clear()
        for step in range(SPANS):
            below = spans.step_traceparent(PARENT, step)
            spans.record_span("verify.forward", parent=below, start_ns=1, end_ns=2, attributes=ATTRIBUTES)

    def encode() -> None:
        encode_spans(memory.get_finished_spans()).SerializeToString()

    print(machine.lines(machine.describe()))
    print(f"\nus of a span: recorded {_micros(record):.1f}, encoded {_micros(encode):.1f}")
    return 0


def _micros(work: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return 1e6 * best / SPANS


if __name__ == "__main__":
    run(main)
