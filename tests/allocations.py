"""How much memory work takes for a moment: what it copies, counted and not timed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from statistics import median


def allocated(work: Callable[[], object]) -> int:
    """Bytes that `work` holds at once at most, beyond what there was before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def usually_allocated(step: Callable[[], object]) -> int:
    """The median over nine steps: once in a while a growing list is copied to a larger place."""
    step()
    return round(median(allocated(step) for _ in range(9)))
