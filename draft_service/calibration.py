"""Learns from verdicts how likely the target is to choose a candidate that a drafter proposes.

Every verdict teaches, whether its positions were verified with drafts or not: wherever the children of a
position had been ranked, it shows which of them the target chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draft_service.drafters.base import Candidate, CandidateSource
from outrider.speculation.acceptance import AcceptanceModel, SharpnessFit, confidence_priors, lookup_priors


class TaskCalibration:
    """What is known about one kind of traffic; where it has seen little, it relies on all traffic."""

    def __init__(self, task: str, models: tuple[AcceptanceModel, ...], fit: SharpnessFit) -> None:
        self._task = task
        self._models = models
        self._fit = fit

    @property
    def sharpness(self) -> float:
        """Factor of the draft's log probabilities relative to the noise, for ranking."""
        return self._fit.value

    def estimate(self, candidate: Candidate) -> float:
        """Return the probability that the target chooses the candidate, given that its walk comes to the
        parent."""
        return self._models[candidate.source].estimate(candidate.bucket, candidate.rank, self._task)

    def observe(self, candidates: Iterable[Candidate], chosen: int) -> None:
        """Note that the target chose `chosen` where these candidates had been ranked."""
        for candidate in candidates:
            taken = candidate.token == chosen
            self._models[candidate.source].observe(candidate.bucket, candidate.rank, taken, self._task)

    def observe_winners(self, winners: Sequence[int], chosen: int) -> None:
        """Note that the target chose `chosen` where each sharpness would have put its winner first."""
        self._fit.observe(winners, chosen)


class Calibration:
    """Calibration of one drafter, by task."""

    def __init__(self) -> None:
        by_source = {
            CandidateSource.MODEL: AcceptanceModel(confidence_priors()),
            CandidateSource.LOOKUP: AcceptanceModel(lookup_priors()),
            CandidateSource.GRAMMAR: AcceptanceModel([1.0]),
        }
        self._models = tuple(by_source[source] for source in CandidateSource)
        self._fit = SharpnessFit()

    def task(self, label: str) -> TaskCalibration:
        """Return the calibration of one traffic label."""
        return TaskCalibration(label, self._models, self._fit)
