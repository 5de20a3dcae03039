"""The rules of Kubernetes' autoscaler, as a model to test the scaler with.

What the orchestrator says is needed becomes a number of replicas
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details), with the
behavior that k8s/components/hpa gives it: up at once; down to the highest number that was needed at any time
of the last `down_seconds`, one replica after the other; a difference of a tenth is none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

TOLERANCE = 0.1
"""That of Kubernetes."""
DOWN_STEPS = 5
"""Replicas that may go in `down_seconds`."""


@dataclass(slots=True)
class Autoscaler:
    """Turns what is needed into what to run, within `least` and `most`."""

    least: int
    most: int
    down_seconds: float
    _needed: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and numbers of the window; a number with a later one that is as high is left out."""
    _down_at: float = -math.inf

    def decide(self, running: int, value: float, now: float) -> int:
        """How many to run, when `running` do and `value` are needed; a value that is no number changes
        nothing."""
        if not math.isfinite(value) or value < 0.0:
            return self._within(running)
        if not self._needed:  # what ran before was needed
            self._needed.append((now, running))
        needed = running if abs(value - running) <= TOLERANCE * running else math.ceil(value)
        needed = self._within(needed)
        self._remember(needed, now)
        if needed >= running:
            return needed
        kept = self._within(self._needed[0][1])
        if kept >= running or now < self._down_at:
            return self._within(running)
        self._down_at = now + self.down_seconds / DOWN_STEPS
        return running - 1

    def _within(self, number: int) -> int:
        return min(max(number, self.least), self.most)

    def _remember(self, needed: int, now: float) -> None:
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now, needed))
        while self._needed[0][0] < now - self.down_seconds:
            self._needed.popleft()
