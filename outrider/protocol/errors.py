"""Every error that the project raises on purpose.

    OutriderError
    ├── InvalidRequest        a field of a request is wrong; names the field
    │   └── ContextTooLong    prompt and output do not fit the model's context
    ├── UnknownModel          the model asked for is not the one that is served
    ├── StaleHandle           a KV handle can no longer be used; says why
    ├── MismatchedPair        draft and target do not share a vocabulary
    ├── Unauthenticated       the caller has no valid token
    ├── Overloaded            a bound was reached; try again later
    │   ├── OutOfPages        no KV page is left
    │   └── RateLimited       this client asks too often
    ├── Flood                 a peer sent more than it may; its stream is cut off
    ├── Unavailable           nothing can serve this now; try again
    │   ├── Draining          this process is shutting down
    │   ├── LostRank          a process that computes a part of this replica's model is gone
    │   └── NoReplica         no usable replica of a kind
    ├── DeadlineExceeded      the caller's deadline has passed
    ├── ConfigError           a setting is wrong; the process stops at start
    │   └── ModelError        a model cannot be loaded or run; says why
    └── InternalError         our own mistake

`STATUS` maps each to the gRPC status with which it leaves the process; `outrider.protocol.rpc_errors` builds
the `google.rpc` details from `field`, `reason` and `retry_after`.
"""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """gRPC status codes by name and number, so that pure code needs no grpc import."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


def no_json(error: ValueError | RecursionError) -> str:
    """Why a text is no JSON, of what Python's parser raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) if type(error) is not ValueError else "a number has too many digits"


class OutriderError(Exception):
    """Base of all errors; `str()` is one sentence that says what to change."""

    field: str | None = None
    """The request field or setting at fault, when there is one."""
    retry_after: float | None = None
    """Seconds after which the same call may succeed; None: it will not."""
    request_id: str = ""
    """Id of the request that ended with this error, as in logs and traces; empty where it is not known."""

    @property
    def reason(self) -> str:
        """Constant for `google.rpc.ErrorInfo`, such as INVALID_REQUEST."""
        name = type(self).__name__
        return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


class InvalidRequest(OutriderError):
    """A field of a request is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ContextTooLong(InvalidRequest):
    """Prompt and output do not fit the model's context."""


class UnknownModel(OutriderError):
    """The model asked for is not the one that is served."""

    field = "model"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model: {asked!r} is not served here; use {served!r} or leave the field empty")


class StaleHandle(OutriderError):
    """A KV handle can no longer be used; send the tokens instead."""

    field = "kv_handle"


class MismatchedPair(OutriderError):
    """Draft and target do not share a vocabulary."""

    field = "vocabulary_hash"


class Unauthenticated(OutriderError):
    """The caller has no valid bearer token."""


class Overloaded(OutriderError):
    """A bound was reached; accepted work goes on."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfPages(Overloaded):
    """No KV page is left."""


class RateLimited(Overloaded):
    """This client asks too often."""


class Flood(OutriderError):
    """A peer sent more than it may; its stream is cut off."""


class Unavailable(OutriderError):
    """Nothing can serve this now."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Unavailable):
    """This process is shutting down and takes no new work."""


class LostRank(Unavailable):
    """A process that computes a part of this replica's model has ended, or does not answer."""


class NoReplica(Unavailable):
    """No usable replica of a kind."""


class DeadlineExceeded(OutriderError):
    """The caller's deadline has passed."""


class ConfigError(OutriderError):
    """A setting is wrong; the process stops at start."""


class ModelError(ConfigError):
    """A model cannot be loaded or run."""


class InternalError(OutriderError):
    """Our own mistake."""


STATUS: dict[type[OutriderError], Status] = {
    InvalidRequest: Status.INVALID_ARGUMENT,
    ContextTooLong: Status.INVALID_ARGUMENT,
    UnknownModel: Status.NOT_FOUND,
    StaleHandle: Status.FAILED_PRECONDITION,
    MismatchedPair: Status.FAILED_PRECONDITION,
    Unauthenticated: Status.UNAUTHENTICATED,
    Overloaded: Status.RESOURCE_EXHAUSTED,
    OutOfPages: Status.RESOURCE_EXHAUSTED,
    RateLimited: Status.RESOURCE_EXHAUSTED,
    Flood: Status.RESOURCE_EXHAUSTED,
    Unavailable: Status.UNAVAILABLE,
    Draining: Status.UNAVAILABLE,
    LostRank: Status.UNAVAILABLE,
    NoReplica: Status.UNAVAILABLE,
    DeadlineExceeded: Status.DEADLINE_EXCEEDED,
    ConfigError: Status.FAILED_PRECONDITION,
    ModelError: Status.FAILED_PRECONDITION,
    InternalError: Status.INTERNAL,
    OutriderError: Status.INTERNAL,
}
