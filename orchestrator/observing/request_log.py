"""The log line of one request: its counts, its times, its replicas, and how it ended. Pure.

Neither its text nor its tokens are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.output import Completion
from orchestrator.request.resolver import ResolvedRequest

DIGITS = 4
"""Decimals of times in seconds."""
OK = "OK"


def fields_of(
    request: ResolvedRequest, completions: Sequence[Completion], waited: float, seconds: float, problem: str
) -> dict[str, Any]:
    """The fields of the line; `problem` is the reason of what ended the request early, or empty.

    Counts are sums over the continuations that ended, times are seconds from the request's arrival.
    """
    statistics = [one.statistics for one in completions]
    steps = sum(one.steps for one in statistics)
    committed = sum(one.committed for one in statistics)
    return {
        "status": problem or OK,
        "model": request.served.model,
        "mode": request.mode.name.lower(),
        "task": request.task,
        "continuations": request.sampling.n,
        "finish_reasons": [one.reason.name.lower() for one in completions],
        "prompt_tokens": len(request.prompt),
        "cached_tokens": max((one.cached for one in statistics), default=0),
        "output_tokens": sum(one.completion_tokens for one in completions),
        "resumed_tokens": len(request.resumed),
        "queue_seconds": round(waited, DIGITS),
        "first_token_seconds": _first(completions),
        "seconds": round(seconds, DIGITS),
        "steps": steps,
        "acceptance_length": round(committed / steps, 3) if steps else 0.0,
        "verified": sum(one.verified for one in statistics),
        "accepted": sum(one.accepted for one in statistics),
        "verify": _named(one.verify for one in completions),
        "draft": _named(one.draft for one in completions),
        "verify_losses": sum(one.verify_losses for one in statistics),
        "draft_losses": sum(one.draft_losses for one in statistics),
    }


def _first(completions: Sequence[Completion]) -> float | None:
    """Seconds to the first token of the continuation that was the first to have one; None: none had."""
    times = [one.first_token_seconds for one in completions if one.statistics.steps]
    return round(min(times), DIGITS) if times else None


def _named(endpoints: Any) -> list[str]:
    """Each replica once."""
    return sorted({endpoint for endpoint in endpoints if endpoint})
