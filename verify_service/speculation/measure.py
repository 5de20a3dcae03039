"""Measures T(n) at start-up, before the first session."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import Segment
from verify_service.speculation.cost_model import CostModel, measuring_points
from verify_service.verifier import Runner

ROUNDS = 5
MAX_ROWS = 128
"""Most rows of logits of a measured step; a longer step is prefill, which needs few rows."""
MAX_MEASUREMENT = 3.0
"""Seconds after which larger steps are extrapolated, and no further round begins."""


def measure_costs(runner: Runner, max_tokens: int, edges: Sequence[int] = ()) -> CostModel:
    """Measure T(n) for n up to `max_tokens`, with one sequence and no context; steps take longer beyond
    `edges`.

    Each point is the best of several rounds over all points, so that other work of the machine does not
    distort it.
    """
    points = measuring_points(max_tokens, edges)
    end = perf_counter() + MAX_MEASUREMENT
    _time_step(runner, points[0])  # the first step of all is slow
    best = _round(runner, points, end)
    for _ in range(ROUNDS - 1):
        if perf_counter() < end:
            best = [min(pair) for pair in zip(best, _round(runner, points, end), strict=True)]
    return CostModel(points, best, max_tokens)


def _round(runner: Runner, points: list[int], end: float) -> list[float]:
    """Return the seconds of a step at every point; after the time `end`, extrapolate from the last measured
    one."""
    seconds: list[float] = []
    for index, tokens in enumerate(points):
        if seconds and perf_counter() > end:
            seconds.append(seconds[-1] * tokens / points[index - 1])
        else:
            seconds.append(_time_step(runner, tokens))
    return seconds


def _time_step(runner: Runner, tokens: int) -> float:
    kv = SequenceKv.open(runner.pool, [], reuse=False)
    start = perf_counter()
    logits = runner.forward([Segment(kv, [0] * tokens, None, range(min(tokens, MAX_ROWS)), certain=tokens)])
    logits.argmax(dim=-1).tolist()  # waits for the device
    elapsed = perf_counter() - start
    kv.release()
    return elapsed
