"""Sentences on standard error, beside what a command prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def say(sentence: str) -> None:
    """A line."""
    print(f"outrider: {sentence}", file=sys.stderr, flush=True)


def counter(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Callable[[float], None]:
    """Call the result with how much of `total` is done: it says so, and how long the rest may take."""
    begun = clock()

    def done(so_far: float) -> None:
        left = (clock() - begun) * (total - so_far) / so_far if so_far else 0.0
        say(f"{what}: {so_far / total:.0%}, about {left:.0f} s left")

    return done
