"""Spans of the streams between services, one for each side, as in the OpenTelemetry conventions for gRPC.

The calling side's span is a child of the request's. Its traceparent is sent in the call's metadata, so that
the answering side's span becomes its child. Backends draw their maps of services from such pairs. Spans of
steps are not below these: parts of a step are found by its number, whichever stream they came through.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from outrider.protocol.errors import OutriderError
from outrider.protocol.rpc_errors import code_of
from outrider.rpc.metadata import metadata_value
from outrider.telemetry.spans import Attribute, SpanKind, child_traceparent, is_sampled, record_span

GENERATE = "outrider.v1.GenerationService/Generate"
VERIFY = "outrider.internal.v1.VerifyService/Verify"
DRAFT = "outrider.internal.v1.DraftService/Draft"
METADATA_KEY = "traceparent"
SERVER_ERRORS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
"""Statuses that are the server's fault."""
NO_ERRORS = frozenset(("OK", "CANCELLED"))
"""Statuses that are no errors to the caller; it was the caller that cancelled."""

Metadata = tuple[tuple[str, str], ...]
Context = grpc.aio.ServicerContext[Any, Any]


@contextmanager
def client_span(method: str, parent: str, endpoint: str) -> Iterator[Metadata]:
    """Record the calling side of a stream below `parent`; yields the metadata to send to the other side.

    The span's status is that of the error that leaves the block.
    """
    if not is_sampled(parent):
        yield ()
        return
    host, _, port = endpoint.rpartition(":")
    span_id = random.getrandbits(64) or 1
    attributes: dict[str, Attribute] = {"server.address": endpoint}
    if port.isdecimal():
        attributes = {"server.address": host, "server.port": int(port)}
    with _recorded(method, parent, span_id, SpanKind.CLIENT, attributes):
        yield ((METADATA_KEY, child_traceparent(parent, span_id)),)


@contextmanager
def server_span(method: str, context: Context) -> Iterator[None]:
    """Record the answering side of a stream if its caller records it."""
    parent = metadata_value(context, METADATA_KEY)
    if not is_sampled(parent):
        yield
        return
    with _recorded(method, parent, random.getrandbits(64) or 1, SpanKind.SERVER, {}):
        yield


def rpc_attributes(method: str, status: str, kind: SpanKind) -> dict[str, Attribute]:
    """The conventions' attributes of a call that ended with a status such as "OK"."""
    failed = {"error.type": status} if _is_error(status, kind) else {}
    return {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": status, **failed}


@contextmanager
def _recorded(
    method: str, parent: str, span_id: int, kind: SpanKind, more: dict[str, Attribute]
) -> Iterator[None]:
    start_ns, status = time.time_ns(), "OK"
    try:
        yield
    except OutriderError as error:
        status = code_of(error).name
        raise
    except (asyncio.CancelledError, grpc.aio.InternalError):  # InternalError: cancelled during a write
        status = "CANCELLED"
        raise
    except BaseException:
        status = "INTERNAL"
        raise
    finally:
        record_span(
            method,
            parent=parent,
            start_ns=start_ns,
            end_ns=time.time_ns(),
            attributes=rpc_attributes(method, status, kind) | more,
            span_id=span_id,
            kind=kind,
            error=status if _is_error(status, kind) else "",
        )


def _is_error(status: str, kind: SpanKind) -> bool:
    return status in SERVER_ERRORS if kind is SpanKind.SERVER else status not in NO_ERRORS
