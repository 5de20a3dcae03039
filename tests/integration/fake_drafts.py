"""Serves a draft service that a test wrote, as a real gRPC server with health."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.internal.v1 import draft_pb2_grpc

THREADS = 64
"""Every open session holds one."""


def serve(servicer: draft_pb2_grpc.DraftServiceServicer) -> tuple[grpc.Server, str]:
    """Start it on a free port; server and endpoint."""
    server = grpc.server(ThreadPoolExecutor(THREADS))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"
