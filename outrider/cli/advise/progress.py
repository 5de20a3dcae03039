"""Shows on standard error what `advise` does at present, and how long that may still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(slots=True)
class WorkProgress:
    """One piece of work after the other; `clock` is in seconds."""

    clock: Callable[[], float] = time.monotonic
    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def say(self, sentence: str) -> None:
        """A line."""
        print(f"outrider: {sentence}", file=self.stream, flush=True)

    def counter(self, what: str, total: float) -> Callable[[float], None]:
        """Call the result with how much of `total` is done: it says so, and how long the rest may take."""
        begun = self.clock()

        def done(so_far: float) -> None:
            left = (self.clock() - begun) * (total - so_far) / so_far if so_far else 0.0
            self.say(f"{what}: {so_far / total:.0%}, about {left:.0f} s left")

        return done
