"""Graphs without a device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from outrider.engine.gpu.graphs import Replay


class FakeGraphs:
    """A replay runs the forward again and leaves the result where the first one did."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """See Graphs."""
        result = run().clone()
        self.captured += 1

        def replay() -> Tensor:
            self.replayed += 1
            return result.copy_(run())

        return replay
