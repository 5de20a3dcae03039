"""Metrics of requests by model: what callers feel, with a bounded label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from outrider.telemetry.metric_parts import Maker
from outrider.telemetry.request_metrics import LENGTH_BUCKETS, MAX_MODELS, request_metrics


def test_models_are_bounded() -> None:
    """The one that was heard of longest ago ends its series."""
    registry = CollectorRegistry()
    metrics = request_metrics(Maker("x", registry))
    for number in range(MAX_MODELS + 1):
        metrics.of(f"m{number}").prompt.observe(7)
    (family,) = (one for one in registry.collect() if one.name == "x_prompt_tokens")
    models = {sample.labels["model"] for sample in family.samples}
    assert models == {f"m{number}" for number in range(1, MAX_MODELS + 1)}


def test_lengths_reach_from_one_token_to_a_whole_book() -> None:
    """Three buckets to each power of ten."""
    assert LENGTH_BUCKETS[:6] == (1, 2, 5, 10, 20, 50)
    assert LENGTH_BUCKETS[-1] == 200_000
    assert list(LENGTH_BUCKETS) == sorted(set(LENGTH_BUCKETS))
