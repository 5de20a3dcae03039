"""Finds out when a draft stops fitting the traffic: a change detector on acceptance.

A draft that fits badly costs only speed, so nobody notices. The detector is Page-Hinkley's, one-sided (Page,
Continuous inspection schemes, Biometrika 41, 1954; Hinkley, Inference about the change-point from cumulative
sum tests, Biometrika 58, 1971). With x the outcomes and m their mean since the detector began, it sums m - x
- TOLERANCE and alarms when the sum has risen by THRESHOLD above its lowest value. A fall of x by less than
TOLERANCE makes the sum fall, so there is no lasting alarm. A larger fall makes the sum rise with every step
by the difference. After an alarm the detector begins anew: the present level is the new normal.

The outcome of a step is whether its walk took a candidate for the first position. Deeper positions are left
out: the budget decides how many of them are verified, so they change with load even if the draft does not.

False-alarm rate and delay: docs/drift.md, `python -m benchmarks.drift`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.messages import Verdict
from outrider.recent import Recent

TOLERANCE = 0.05
"""Fall of mean acceptance below which there is no alarm."""
THRESHOLD = 25.0
"""Accumulated fall of acceptance at which the alarm is raised."""
MIN_STEPS = 300
"""Steps before the mean is trusted: no alarm comes earlier."""
MAX_WATCHED = 256
"""Most pairs of task and draft replica that are watched. Beyond that the least recently used is forgotten."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The detector after one outcome."""

    statistic: float
    """Accumulated fall as a share of the fall that raises the alarm, 0 to 1."""
    alarm: bool
    before: float
    """Mean acceptance since the detector began."""
    steps: int
    """Number of outcomes in the mean."""


class PageHinkley:
    """Detects a fall of the mean of a stream of outcomes, each 0 or 1."""

    def __init__(self) -> None:
        self._steps, self._mean = 0, 0.0
        self._fall = 0.0
        """The sum, less its lowest value so far."""

    def observe(self, outcome: float) -> Reading:
        """Take one outcome into account; after an alarm the detector begins anew."""
        self._steps += 1
        self._mean += (outcome - self._mean) / self._steps
        self._fall = max(self._fall + self._mean - outcome - TOLERANCE, 0.0)
        alarm = self._fall >= THRESHOLD and self._steps >= MIN_STEPS
        reading = Reading(min(self._fall / THRESHOLD, 1.0), alarm, self._mean, self._steps)
        if alarm:
            self._steps, self._mean, self._fall = 0, 0.0, 0.0
        return reading


class DriftWatch:
    """One detector per task and draft replica."""

    def __init__(self) -> None:
        self._detectors = Recent[tuple[str, str], PageHinkley](MAX_WATCHED)

    def observe(self, task: str, draft: str, verdict: Verdict) -> Reading | None:
        """Learn from a verdict; None when it says nothing about the draft."""
        if verdict.verified <= verdict.lookup_verified:
            return None
        detector = self._detectors.use((task, draft), PageHinkley)
        return detector.observe(float(verdict.accepted > 0))
