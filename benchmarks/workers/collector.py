"""Receives spans over OTLP and counts them: `python -m benchmarks.workers.collector`.

Says {"endpoint"} when it is ready; answers every line of standard input with {"spans"}, the number so far.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Counter(TraceServiceServicer):
    """Counts what it is sent, and forgets it."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(  # noqa: N802 - the name on the wire
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """One batch of one process."""
        self.spans += sum(len(scope.spans) for each in request.resource_spans for scope in each.scope_spans)
        return ExportTraceServiceResponse()


def main() -> None:
    """Serve until standard input ends."""
    counter, server = Counter(), grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(counter, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps({"endpoint": f"http://127.0.0.1:{port}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"spans": counter.spans}), flush=True)
    server.stop(None)


if __name__ == "__main__":
    main()
