"""Errors in the form of Anthropic's API. docs/messages.md shows the same table."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.gateway.errors import KINDS, Problem
from orchestrator.gateway.incoming.fields import THREAD
from outrider.protocol.errors import ContextTooLong

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
LENGTHS = re.compile(r"max_tokens: (\d+) and a prompt of (\d+) tokens .* maximum context length is (\d+)")
"""What the orchestrator says when `max_tokens` is more than the prompt leaves."""


def body_of(problem: Problem, request_id: str) -> dict[str, Any]:
    """The error as a JSON body."""
    kind = problem.kind
    error: dict[str, Any] = {"type": TYPES.get(kind.status, kind.type), "message": _message(problem)}
    if problem.parameter == THREAD:
        error["details"] = {"error_code": WITHOUT_THREADS, "unsupported": [THREAD]}
    return {"type": "error", "error": error, "request_id": request_id}


def _message(problem: Problem) -> str:
    """What is wrong. Clients know by Anthropic's own words that they have to shorten the conversation, or by
    its numbers (prompt, `max_tokens` and context) how many tokens they may ask for.
    """
    if problem.kind != KINDS[ContextTooLong]:
        return problem.message
    if found := LENGTHS.match(problem.message):
        sizes = f"{found[2]} + {found[1]} > {found[3]}"
        return f"input length and `max_tokens` exceed context limit: {sizes}; {problem.message}"
    return problem.message if problem.parameter == "max_tokens" else f"prompt is too long: {problem.message}"
