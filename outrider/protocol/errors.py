"""Every error that the project raises on purpose; `outrider.protocol.rpc_errors` sends them over the wire."""

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


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the error's type if there is none."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def no_json(error: ValueError | RecursionError) -> str:
    """Why a text is no JSON, from the error that Python's parser raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) if type(error) is not ValueError else "a number has too many digits"


class OutriderError(Exception):
    """Base of all errors; `str()` is one sentence that says what to change."""

    status = Status.INTERNAL
    """gRPC status with which the error leaves the process."""
    field: str | None = None
    """The request field or setting at fault, if there is one."""
    retry_after: float | None = None
    """Seconds after which the same call may succeed; None if it will not."""
    request_id: str = ""
    """Id of the request that ended with this error, as in logs and traces; empty if it is unknown."""

    @property
    def reason(self) -> str:
        """The `reason` of `google.rpc.ErrorInfo`, such as INVALID_REQUEST."""
        name = type(self).__name__
        return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


class InvalidRequest(OutriderError):
    """A field of a request is wrong."""

    status = Status.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ContextTooLong(InvalidRequest):
    """Prompt and output do not fit the model's context."""


class UnknownModel(OutriderError):
    """The model asked for is not the one that is served."""

    status = Status.NOT_FOUND
    field = "model"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model: {asked!r} is not served here; use {served!r}")


class ModelGone(UnknownModel):
    """The model of a request is no longer served."""

    def __init__(self, problem: str) -> None:
        OutriderError.__init__(self, problem)


class StaleHandle(OutriderError):
    """A KV handle can no longer be used; send the tokens instead."""

    status = Status.FAILED_PRECONDITION
    field = "kv_handle"


class MismatchedPair(OutriderError):
    """Draft and target do not share a vocabulary."""

    status = Status.FAILED_PRECONDITION
    field = "vocabulary_hash"


class Unauthenticated(OutriderError):
    """The caller has no valid bearer token."""

    status = Status.UNAUTHENTICATED


class Overloaded(OutriderError):
    """A limit was reached; accepted work continues."""

    status = Status.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfPages(Overloaded):
    """No KV page is free."""


class RateLimited(Overloaded):
    """This client sends requests too often."""


class Flood(OutriderError):
    """A peer sent more than it may; its stream is cut off."""

    status = Status.RESOURCE_EXHAUSTED


class Unavailable(OutriderError):
    """Nothing can serve this now."""

    status = Status.UNAVAILABLE
    retry_after: float | None = 1.0


class Draining(Unavailable):
    """This process is shutting down and takes no new work."""


class LostRank(Unavailable):
    """A process that computes a part of this replica's model has ended, or does not answer."""


class NoReplica(Unavailable):
    """No usable replica of a kind."""


class DeadlineExceeded(OutriderError):
    """The caller's deadline has passed."""

    status = Status.DEADLINE_EXCEEDED


class NotRead(DeadlineExceeded):
    """The caller did not read its stream for too long; it can resume it."""


class ConfigError(OutriderError):
    """A setting is wrong; the process stops at start."""

    status = Status.FAILED_PRECONDITION


class ModelError(ConfigError):
    """A model cannot be loaded or run."""


class InternalError(OutriderError):
    """Our own mistake."""

    status = Status.INTERNAL
