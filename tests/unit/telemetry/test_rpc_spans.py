"""Spans of a stream between services: both sides fit together and say how it ended."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outrider.internal.v1 import draft_pb2, verify_pb2
from outrider.protocol.errors import InvalidRequest, OutriderError, Unavailable
from outrider.telemetry.rpc_spans import DRAFT, GENERATE, VERIFY, Metadata, client_span, server_span
from outrider.v1 import generation_pb2

PARENT = f"00-{1:032x}-{2:016x}-01"
UNSAMPLED = PARENT[:-2] + "00"


class Call:
    """What a servicer is given, as far as spans look at it."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        """As the caller sent it."""
        return self._metadata


def test_the_two_sides_of_a_stream(exporter: InMemorySpanExporter) -> None:
    """The answering side is the child of the calling one, which is a child of the request."""
    with (
        client_span(VERIFY, PARENT, "[::1]:50051") as metadata,
        server_span(VERIFY, Call(metadata)),  # type: ignore[arg-type]
    ):
        pass
    server, client = exporter.get_finished_spans()
    assert (client.name, server.name) == (VERIFY, VERIFY)
    assert (client.kind, server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert client.parent is not None
    assert client.parent.span_id == 2
    assert client.context is not None
    assert server.parent is not None
    assert server.parent.span_id == client.context.span_id
    common = {"rpc.system.name": "grpc", "rpc.method": VERIFY, "rpc.response.status_code": "OK"}
    assert server.attributes == common
    assert client.attributes == common | {"server.address": "[::1]", "server.port": 50051}
    assert client.status.status_code is server.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("error", "status", "at_client", "at_server"),
    [
        (Unavailable("gone"), "UNAVAILABLE", True, True),
        (InvalidRequest("open", "is missing"), "INVALID_ARGUMENT", True, False),
        (asyncio.CancelledError(), "CANCELLED", False, False),
        (KeyError("a bug"), "INTERNAL", True, True),
    ],
)
def test_how_a_stream_ended(
    exporter: InMemorySpanExporter, error: BaseException, status: str, at_client: bool, at_server: bool
) -> None:
    """To the caller all is an error that it did not end itself; to the server only what is its fault."""
    with (
        pytest.raises((OutriderError, asyncio.CancelledError, KeyError)),
        client_span(DRAFT, PARENT, "unix:/run/draft") as metadata,
        server_span(DRAFT, Call(metadata)),  # type: ignore[arg-type]
    ):
        raise error
    server, client = exporter.get_finished_spans()
    for span, failed in ((client, at_client), (server, at_server)):
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == status
        assert span.attributes.get("error.type") == (status if failed else None)
        assert (span.status.status_code is StatusCode.ERROR) is failed
    assert client.attributes is not None
    assert client.attributes["server.address"] == "unix:/run/draft"


@pytest.mark.parametrize("parent", ["", UNSAMPLED])
def test_an_unsampled_request_sends_nothing_along(exporter: InMemorySpanExporter, parent: str) -> None:
    """No metadata, no spans."""
    with client_span(VERIFY, parent, "verify:50051") as metadata:
        assert metadata == ()
        with server_span(VERIFY, Call(metadata)):  # type: ignore[arg-type]
            pass
    assert exporter.get_finished_spans() == ()


def test_methods_exist() -> None:
    """Their names are those of the protocol."""
    files = (generation_pb2, verify_pb2, draft_pb2)
    methods = {
        f"{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {GENERATE, VERIFY, DRAFT} <= methods
