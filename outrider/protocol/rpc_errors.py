"""Converts between our errors and gRPC statuses with `google.rpc` details.

A status carries `ErrorInfo` (reason, domain "outrider"), `BadRequest` if a field is at fault, `RetryInfo` if
the same call may work later, and `RequestInfo` with the id of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import (  # type: ignore[import-untyped]
    BadRequest,
    ErrorInfo,
    RequestInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status as RpcStatus  # type: ignore[import-untyped]

from outrider.protocol.errors import (
    DeadlineExceeded,
    Flood,
    InternalError,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "outrider"
TOO_LARGE = ("CLIENT: Received message larger than max", "received metadata size exceeds")
"""Parts of gRPC's own messages for an answer above the limit of the channel or method, or for headers above
the limit of the server."""
REFUSED = "SERVER: Received message larger than max"
"""Part of gRPC's own message for a request above the limit of the server. It would be refused again."""
DETAILS_KEY = "grpc-status-details-bin"
NO_DETAILS: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.INTERNAL: Unavailable,  # a connection that broke during a write, a reset stream
    grpc.StatusCode.UNKNOWN: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}
"""The errors that gRPC's own statuses, without our details, stand for; others become an InternalError."""
HINTS = {grpc.StatusCode.UNIMPLEMENTED: "; the endpoint is another service, or of an older release"}
"""Hints that are added to gRPC's own message."""

MAX_MESSAGE = 300
"""Most characters of a message. Some messages repeat what the caller sent; a client accepts 8 KiB of
metadata, in which a character may take 12 bytes in the status and twice 6 in the details."""


def _tree(kind: type[OutriderError]) -> list[type[OutriderError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _tree(below))]


_BY_REASON = {kind.__new__(kind).reason: kind for kind in _tree(OutriderError)}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def code_of(error: OutriderError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return _CODES[error.status.value]


def code_of_reason(reason: str) -> grpc.StatusCode:
    """The gRPC status code of the errors with a reason; UNKNOWN if no error has it."""
    kind = _BY_REASON.get(reason)
    return grpc.StatusCode.UNKNOWN if kind is None else _CODES[kind.status.value]


def message_of(error: OutriderError) -> str:
    """The text of an error, shortened in the middle if it is long."""
    return _cut(str(error))


def details_of(error: OutriderError) -> bytes:
    """The serialized `google.rpc.Status` of an error, for the trailing metadata."""
    message = message_of(error)
    status = RpcStatus(code=error.status.value, message=message)
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field is not None:
        violation = BadRequest.FieldViolation(field=_cut(error.field), description=message)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    if error.request_id:
        status.details.add().Pack(RequestInfo(request_id=error.request_id))
    serialized: bytes = status.SerializeToString()
    return serialized


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE:
        return text
    return f"{text[: MAX_MESSAGE * 2 // 3]} ... {text[-(MAX_MESSAGE // 3 - 5) :]}"


def error_of(call_error: grpc.aio.AioRpcError) -> OutriderError:
    """The error that a failed call stands for, with its message, field and retry_after."""
    for key, value in call_error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                error = _from_details(RpcStatus.FromString(value))
            except DecodeError:
                break
            if error is not None:
                return error
    details = call_error.details() or "no details"
    if REFUSED in details:
        return InvalidRequest("message", f"is larger than the service takes; shorten it ({details})")
    too_large = any(said in details for said in TOO_LARGE)
    kind = Flood if too_large else NO_DETAILS.get(call_error.code(), InternalError)
    made = kind(f"{call_error.code().name}: {details}{HINTS.get(call_error.code(), '')}")
    if isinstance(made, Unavailable):
        made.retry_after = None  # the service did not say when to retry
    return made


def _from_details(status: RpcStatus) -> OutriderError | None:
    info, violations, retry, request = ErrorInfo(), BadRequest(), RetryInfo(), RequestInfo()
    for detail in status.details:
        for message in (info, violations, retry, request):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    kind = _BY_REASON.get(info.reason) if info.domain == DOMAIN else None
    if kind is None:
        return None
    fields = [violation.field for violation in violations.field_violations]
    retry_after = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    error = _rebuild(kind, status.message, fields, retry_after)
    error.request_id = request.request_id
    return error


def _rebuild(
    kind: type[OutriderError], message: str, fields: Sequence[str], retry_after: float | None
) -> OutriderError:
    """The error as it was before it was sent. Constructors compose messages, so none is called."""
    error = kind.__new__(kind, message)
    if fields:
        error.field = fields[0]
    error.retry_after = retry_after
    if isinstance(error, InvalidRequest):
        error.problem = message.removeprefix(f"{error.field}: ")
    return error
