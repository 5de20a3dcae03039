"""From what a drafter says of a candidate to how likely the target chooses it, learned from verdicts.

Every verdict teaches, whether its positions were verified with drafts or not: wherever the children of a
position had been ranked, it tells which of them the target chose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from draft_service.drafters.base import Candidate, Source
from outrider.acceptance import AcceptanceModel, SharpnessFit, confidence_priors, lookup_priors

MAX_TASKS = 64
"""Traffic labels that are told apart; the least recently used is forgotten."""
ENOUGH = 64.0
"""Observations after which a task's own sharpness is trusted."""
COVERAGE_PRIOR = 0.7
COVERAGE_WEIGHT = 0.02


class TaskCalibration:
    """What is known of one kind of traffic; leans on all traffic where it has seen little."""

    def __init__(self, task: str, models: tuple[AcceptanceModel, ...], shared: SharpnessFit) -> None:
        self.coverage = COVERAGE_PRIOR
        """How often the target's choice is among a model's ranked children, decayed."""
        self._task = task
        self._models = models
        self._shared_fit = shared
        self._fit = SharpnessFit()
        self._seen = 0

    @property
    def sharpness(self) -> float:
        """Factor of the draft's log probability against the noise, for ranking."""
        return (self._fit if self._seen >= ENOUGH else self._shared_fit).value

    def estimate(self, candidate: Candidate) -> float:
        """Probability that the target chooses the candidate, given that it gets to its parent."""
        return self._models[candidate.source].estimate(candidate.bucket, candidate.rank, self._task)

    def observe(self, candidates: Iterable[Candidate], chosen: int) -> None:
        """The target chose `chosen` where these candidates had been ranked."""
        covered = modelled = False
        for candidate in candidates:
            taken = candidate.token == chosen
            self._models[candidate.source].observe(candidate.bucket, candidate.rank, taken, self._task)
            if candidate.source is Source.MODEL:
                modelled = True
                covered = covered or taken
        if modelled:
            self.coverage += COVERAGE_WEIGHT * (covered - self.coverage)

    def observe_winners(self, winners: Sequence[int], chosen: int) -> None:
        """The target chose `chosen` where each sharpness would have put its winner first."""
        if winners:
            self._seen += 1
            self._fit.observe(winners, chosen)
            self._shared_fit.observe(winners, chosen)


class Calibration:
    """Calibration of one drafter, by task."""

    def __init__(self) -> None:
        by_source = {
            Source.MODEL: AcceptanceModel(confidence_priors()),
            Source.LOOKUP: AcceptanceModel(lookup_priors()),
        }
        self._models = tuple(by_source[source] for source in Source)
        self._fit = SharpnessFit()
        self._tasks: OrderedDict[str, TaskCalibration] = OrderedDict()

    def task(self, label: str) -> TaskCalibration:
        """The calibration of one traffic label."""
        found = self._tasks.get(label)
        if found is None:
            found = self._tasks[label] = TaskCalibration(label, self._models, self._fit)
            if len(self._tasks) > MAX_TASKS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(label)
        return found
