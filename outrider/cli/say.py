"""What a command writes to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def say(sentence: str) -> None:
    """Print a line to standard error."""
    print(f"outrider: {sentence}", file=sys.stderr, flush=True)


def counter(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Callable[[float], None]:
    """A function to call with how much of `total` is done; it reports that, and the time left."""
    begun = clock()

    def done(so_far: float) -> None:
        left = (clock() - begun) * (total - so_far) / so_far if so_far else 0.0
        say(f"{what}: {so_far / total:.0%}, about {left:.0f} s left")

    return done
