"""Acceptance estimates learned from verdicts."""

from __future__ import annotations

from draft_service.calibration import Calibration
from draft_service.drafters.base import Candidate, CandidateSource
from outrider.speculation.acceptance import SHARPNESS_GRID


def _ranked(source=CandidateSource.MODEL, bucket=5):
    return [Candidate(10, source, bucket, 0), Candidate(11, source, bucket, 1)]


def test_estimates_follow_what_the_target_took():
    """A candidate that is always taken becomes likely, its sibling unlikely."""
    task = Calibration().task("chat")
    for _ in range(300):
        task.observe(_ranked(), 10)
    first, second = (task.estimate(candidate) for candidate in _ranked())
    assert first > 0.9 > 0.1 > second


def test_sources_are_calibrated_apart():
    """What a model's candidates do says nothing about a lookup's."""
    task = Calibration().task("")
    before = task.estimate(_ranked(CandidateSource.LOOKUP)[0])
    for _ in range(50):
        task.observe(_ranked(CandidateSource.MODEL), 99)
    assert task.estimate(_ranked(CandidateSource.LOOKUP)[0]) == before


def test_tasks_have_their_own_estimates():
    """Code that the draft knows does not make chat look better than it is, where both have been seen."""
    calibration = Calibration()
    code, chat = calibration.task("code"), calibration.task("chat")
    for _ in range(500):
        code.observe(_ranked(), 10)
        chat.observe(_ranked(), 99)
    assert code.estimate(_ranked()[0]) > chat.estimate(_ranked()[0]) + 0.3


def test_sharpness_is_fitted_over_all_traffic():
    """It is the draft's, whatever it is asked for."""
    calibration = Calibration()
    winners = tuple(range(len(SHARPNESS_GRID)))
    seen, fresh = calibration.task("seen"), calibration.task("fresh")
    for _ in range(200):
        seen.observe_winners(winners, 7)
    assert seen.sharpness == fresh.sharpness == SHARPNESS_GRID[7]
