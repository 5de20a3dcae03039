"""Errors in the form of Anthropic's API. docs/messages.md shows the same table."""

from __future__ import annotations

from typing import Any

from orchestrator.gateway.errors import Problem
from orchestrator.gateway.incoming.fields import THREAD

TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
}
"""Types of errors by status, where OpenAI's API calls them otherwise."""
WITHOUT_THREADS = "thread_unsupported_request"
"""Code by which the tool runners of Anthropic's clients know that they have to send whole conversations."""


def body_of(problem: Problem, request_id: str) -> dict[str, Any]:
    """The error as a JSON body."""
    kind = problem.kind
    error: dict[str, Any] = {"type": TYPES.get(kind.status, kind.type), "message": problem.message}
    if problem.parameter == THREAD:
        error["details"] = {"error_code": WITHOUT_THREADS, "unsupported": [THREAD]}
    return {"type": "error", "error": error, "request_id": request_id}
