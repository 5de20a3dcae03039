"""Measures how long forwards take: processor time of one thread, median of several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment

ROUNDS = 7
MAX_SECONDS = 3.0
"""Time of one step's rounds after which no further round begins."""
MAX_LOGITS = 64
"""Most rows of logits of a session. A longer step is a prompt, of which few logits are needed."""
now = time.thread_time
"""Processor time of the calling thread."""


def time_step(
    runner: ModelRunner,
    sessions: int,
    count: int,
    context: int,
    clock: Callable[[], float] = now,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of a forward over `count` tokens of each session, after `context` tokens of each.

    Where that is more than the model takes, sessions have less context, and a prompt is spread over several.
    `before` is called before every round, because of what it leaves in the caches.
    """
    limit = runner.loaded.context_length
    prompts = -(-count // limit)
    sessions, count = sessions * prompts, count // prompts
    context = min(context, limit - count)
    seconds: list[float] = []
    while len(seconds) < ROUNDS and sum(seconds) < MAX_SECONDS:
        before()
        seconds.append(_time(runner, sessions, count, context, clock))
    return median(seconds)


def one_step(runner: ModelRunner, context: int) -> None:
    """Run a forward over one token, which brings all weights through the caches."""
    _time(runner, 1, 1, min(context, runner.loaded.context_length - 1), now)


def _time(runner: ModelRunner, sessions: int, count: int, context: int, clock: Callable[[], float]) -> float:
    sequences = [_sequence(runner, context) for _ in range(sessions)]
    segments = [Segment(kv, [1] * count, None, range(min(count, MAX_LOGITS))) for kv in sequences]
    start = clock()
    runner.forward(segments)
    seconds = clock() - start
    for kv in sequences:
        kv.release()
    return seconds


def _sequence(runner: ModelRunner, context: int) -> SequenceKv:
    """A sequence with `context` tokens; their keys and values are arbitrary."""
    kv = SequenceKv.open(runner.pool, [])
    kv.reserve(context)
    kv.append([1] * context, None)
    runner.commit(kv, range(context), [1] * context)
    return kv
