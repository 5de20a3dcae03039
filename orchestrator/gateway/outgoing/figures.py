"""Times and speculation of one request, under the names and in the place that vLLM's clients expect. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.client import Complete


def metrics_of(ends: Sequence[Complete]) -> dict[str, Any] | None:
    """The `metrics` of an answer; None when it has several continuations, as each has its own times."""
    if len(ends) != 1:
        return None
    return {**_times(ends[0]), "speculative_decoding": _speculation(ends[0])}


def _times(end: Complete) -> dict[str, float | None]:
    """Times in milliseconds; time in the queue is counted only as `queue_time_ms`."""
    counts, tokens = end.speculation, end.usage.completion_tokens
    queued, first, total = (
        counts.get(f"{name}_micros", 0) / 1000 for name in ("admission", "first_token", "total")
    )
    working = total - queued
    return {
        "time_to_first_token_ms": first - queued,
        "generation_time_ms": total - first,
        "queue_time_ms": queued,
        "mean_itl_ms": (total - first) / (tokens - 1) if tokens > 1 else None,
        "tokens_per_second": tokens / working * 1000 if working > 0 else None,
    }


def _speculation(end: Complete) -> dict[str, Any]:
    """Figures of the steps that verified candidates.

    `num_spec_tokens` is the most that one step accepted, because trees have no configured depth.
    """
    histogram = list(end.accepted_histogram) or [0]
    steps, verified = sum(histogram), int(end.speculation.get("verified", 0))
    accepted = sum(count * tokens for tokens, count in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / verified if verified else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": verified,
        "num_spec_tokens": len(histogram) - 1,
    }
