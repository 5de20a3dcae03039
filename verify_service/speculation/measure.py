"""Measures T(n) at start-up, before the first session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import Segment
from verify_service.speculation.cost_model import CostModel, measuring_points
from verify_service.verifier import Runner

ROUNDS = 5
SMALL = 64
"""Tokens up to which a step is measured in every round, on both sides of each edge: drafting is decided by
what these take. Larger ones are mostly prefill."""
MAX_ROWS = 128
"""Most rows of logits of a measured step; a longer step is prefill, which needs few rows."""
MAX_MEASUREMENT = 3.0
"""Seconds for small steps: no further round begins later. Larger steps have as long again; those that are
left are extrapolated."""


def measure_costs(
    runner: Runner, max_tokens: int, edges: Sequence[int] = (), clock: Callable[[], float] = perf_counter
) -> CostModel:
    """Measure T(n) for n up to `max_tokens`, with one sequence and no context; steps take longer beyond
    `edges`.

    Each small step is the best of several rounds over all of them, so that other work of the machine does not
    distort it. Larger ones are the better of two, because a runner may record the first step of a size. One
    of the largest comes before them: its memory serves them all, and a step that has to take new memory from
    the system is up to twice as long.
    """
    points = measuring_points(max_tokens, [edge for edge in edges if edge < SMALL])
    stopwatch = _Stopwatch(runner, clock)
    stopwatch.time_step(points[0])  # the first step of all is slow
    small = [tokens for tokens in points if tokens <= SMALL]
    end = clock() + MAX_MEASUREMENT
    best = stopwatch.round(small, [], end)
    for _ in range(ROUNDS - 1):
        if clock() < end:
            best = [min(pair) for pair in zip(best, stopwatch.round(small, [], inf), strict=True)]
    end = clock() + MAX_MEASUREMENT
    if clock() + best[-1] * points[-1] / small[-1] < end:
        stopwatch.time_step(points[-1])
    return CostModel(points, stopwatch.round(points, best, end, steps=2), max_tokens)


class _Stopwatch:
    """Times steps of a runner."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock

    def round(self, points: Sequence[int], known: Sequence[float], end: float, steps: int = 1) -> list[float]:
        """Return the least seconds of some steps at every point, of which the first are known; after the time
        `end`, extrapolate from the one before."""
        seconds = [*known]
        for index in range(len(known), len(points)):
            if index and self._clock() > end:
                seconds.append(seconds[-1] * points[index] / points[index - 1])
            else:
                seconds.append(min(self.time_step(points[index]) for _ in range(steps)))
        return seconds

    def time_step(self, tokens: int) -> float:
        """Run a step of so many tokens; return its seconds."""
        kv = SequenceKv.open(self._runner.pool, [])
        wanted = range(min(tokens, MAX_ROWS))
        start = self._clock()
        logits = self._runner.forward([Segment(kv, [0] * tokens, None, wanted, certain=tokens)])
        logits.argmax(dim=-1).tolist()  # waits for the device
        elapsed = self._clock() - start
        kv.release()
        return elapsed
