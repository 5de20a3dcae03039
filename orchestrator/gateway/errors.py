"""The errors of the HTTP API: their statuses and bodies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Flood,
    InvalidRequest,
    OutriderError,
    Overloaded,
    RateLimited,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """An HTTP status, and what OpenAI calls the type and the code of such an error."""

    status: int
    type: str
    code: str | None = None


WRONG = "invalid_request_error"
KINDS: dict[type[OutriderError], Kind] = {
    InvalidRequest: Kind(400, WRONG),
    ContextTooLong: Kind(400, WRONG, "context_length_exceeded"),
    UnknownModel: Kind(404, WRONG, "model_not_found"),
    Unauthenticated: Kind(401, "authentication_error", "invalid_api_key"),
    Overloaded: Kind(429, "overloaded_error", "overloaded"),
    RateLimited: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    Flood: Kind(413, WRONG, "request_too_large"),
    Unavailable: Kind(503, "server_error", "unavailable"),
    DeadlineExceeded: Kind(504, "server_error", "timeout"),
    OutriderError: Kind(500, "server_error", "internal_error"),
}
"""Kinds by class of error. An error has its own class's kind or that of its nearest ancestor. docs/openai.md
shows the same table."""
UNEXPECTED = "internal error; the gateway's log has the details"
PARAMETERS = (
    (re.compile(r"^(sampling|chat)\."), ""),
    (re.compile(r"^chat$"), "messages"),
    (re.compile(r"^token$"), "authorization"),
    (re.compile(r"^(text|token_ids\.ids)(?=\[|$)"), "prompt"),
    (re.compile(r"^token_ids(?=\[|$)"), "tokens"),
    (re.compile(r"^speculation\.prediction\.text$"), "prediction.content"),
    (re.compile(r"^speculation\.prediction$"), "prediction"),
    (re.compile(r"^(messages\[\d+\])\.parts(?=\[)"), r"\1.content"),
    (re.compile(r"^(tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\])\.(?!id$)"), r"\1.function."),
)
"""Patterns that turn names of fields of the gRPC request into the names of this API."""


class Problem(Exception):
    """An answer that is an error; `parameter` is the field of the request that is wrong."""

    def __init__(
        self, kind: Kind, message: str, parameter: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(kind, message, parameter, headers)
        self.kind = kind
        self.message = message
        self.parameter = parameter
        self.headers = headers or {}

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The error as a JSON body, in the form of OpenAI's API."""
        error = {"message": self.message, "type": self.kind.type}
        return {"error": {**error, "param": self.parameter, "code": self.kind.code}}


def wrong(parameter: str, problem: str) -> Problem:
    """The problem for a field of the request that is wrong."""
    return Problem(KINDS[InvalidRequest], f"{parameter}: {problem}", parameter)


def problem_of(error: OutriderError) -> Problem:
    """The problem that answers one of the project's own errors."""
    kind = next(KINDS[one] for one in type(error).__mro__ if one in KINDS)
    parameter = None if error.field is None else _parameter(error.field)
    message = str(error)
    if error.field is not None and message.startswith(f"{error.field}: "):
        message = f"{parameter}: {message.removeprefix(f'{error.field}: ')}"
    return Problem(kind, message, parameter, _headers(kind, error))


def _parameter(name: str) -> str:
    for pattern, instead in PARAMETERS:
        name = pattern.sub(instead, name)
    return name


def _headers(kind: Kind, error: OutriderError) -> dict[str, str]:
    if kind.status == 401:
        return {"www-authenticate": "Bearer"}
    if error.retry_after is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
