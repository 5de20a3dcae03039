"""Metrics of the latencies and lengths of requests as their callers see them, by model."""

from __future__ import annotations

from outrider.telemetry.metric_parts import Bundle, Maker

DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""Buckets in seconds: those of the gen_ai conventions, and three smaller ones, since a pipelined token takes
less than 10 ms."""
LENGTH_BUCKETS = (*(n * 10**e for e in range(5) for n in (1, 2, 5)), 100_000, 200_000)
MAX_MODELS = 8
"""Most values of the label `model`; the one unused longest makes room."""


def request_metrics(make: Maker) -> Bundle:
    """Make the metrics of requests, which have the label `model`."""
    model = "model"
    return Bundle(
        MAX_MODELS,
        seconds=make.histogram(
            "request_seconds", "Time of a request, in the queue too.", DURATION_BUCKETS, model
        ),
        first=make.histogram(
            "time_to_first_token_seconds",
            "Time to the first token, in the queue too.",
            FIRST_TOKEN_BUCKETS,
            model,
        ),
        per_token=make.histogram(
            "time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_BUCKETS, model
        ),
        gap=make.histogram("delivery_gap_seconds", "Pauses in a text.", TOKEN_BUCKETS, model),
        prompt=make.histogram("prompt_tokens", "Tokens of a prompt.", LENGTH_BUCKETS, model),
        output=make.histogram("output_tokens", "Tokens of a continuation.", LENGTH_BUCKETS, model),
        cached=make.counter("prompt_tokens_cached", "Prompt tokens found cached.", model),
    )
