"""Estimates become frequencies, and the best sharpness is found."""

from __future__ import annotations

import random

import pytest

from outrider.speculation.acceptance import (
    BUCKETS,
    LOOKUP_BUCKETS,
    SHARPNESS_GRID,
    AcceptanceModel,
    SharpnessFit,
    bucket,
    confidence_priors,
    lookup_bucket,
    lookup_priors,
)


def test_buckets_order_confidences() -> None:
    """Higher confidence, higher bucket; greedy and sampled rows are told apart."""
    steps = [0.0, 1e-12, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1.0]
    for greedy, first in ((True, 0), (False, BUCKETS // 2)):
        places = [bucket(step, greedy) for step in steps]
        assert places == sorted(places)
        assert (places[0], places[-1]) == (first, first + BUCKETS // 2 - 1)


def test_lookup_buckets_order_match_lengths() -> None:
    """Longer matches, higher bucket, all in range."""
    places = [lookup_bucket(length) for length in range(200)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, LOOKUP_BUCKETS - 1)
    assert len(set(places)) == LOOKUP_BUCKETS


def test_priors_answer_before_anything_is_learned() -> None:
    """A fresh model repeats the confidence, or the prior of the match length."""
    model = AcceptanceModel(confidence_priors())
    for confidence in (0.02, 0.3, 0.5, 0.9, 0.98):
        assert model.estimate(bucket(confidence, greedy=True), 0) == pytest.approx(confidence, abs=0.07)
    assert AcceptanceModel(lookup_priors()).estimate(lookup_bucket(2), 0) == lookup_priors()[1]
    assert len(lookup_priors()) == LOOKUP_BUCKETS


def test_estimates_become_frequencies() -> None:
    """After a few thousand observations estimates match what happens, per bucket and rank."""
    source = random.Random(0)
    model = AcceptanceModel(confidence_priors())

    def truth(place: int, rank: int) -> float:
        return (0.9 - 0.02 * place) / (1 + 2 * rank)

    for _ in range(40000):
        place, rank = source.randrange(0, BUCKETS, 8), source.randrange(3)
        model.observe(place, rank, source.random() < truth(place, rank))
    for place in range(0, BUCKETS, 8):
        for rank in range(3):
            assert model.estimate(place, rank) == pytest.approx(truth(place, rank), abs=0.06)


def test_estimates_follow_a_change() -> None:
    """Counts decay, so a draft that gets worse is soon believed less."""
    source = random.Random(1)
    model = AcceptanceModel(confidence_priors())
    for _ in range(20000):
        model.observe(10, 0, source.random() < 0.8)
    for _ in range(4000):
        model.observe(10, 0, source.random() < 0.3)
    assert model.estimate(10, 0) == pytest.approx(0.3, abs=0.06)


def test_a_task_leans_on_all_tasks_until_it_has_data() -> None:
    """A new label starts from the overall estimate and ends at its own frequency."""
    source = random.Random(2)
    model = AcceptanceModel(confidence_priors())
    for _ in range(2000):
        model.observe(10, 0, source.random() < 0.8, "code")
    assert model.estimate(10, 0, "poems") == model.estimate(10, 0)
    model.observe(10, 0, False, "poems")
    assert model.estimate(10, 0, "poems") > 0.7
    for _ in range(1000):
        model.observe(10, 0, source.random() < 0.1, "poems")
    assert model.estimate(10, 0, "poems") == pytest.approx(0.1, abs=0.06)
    assert model.estimate(10, 0, "code") > 0.6


def test_tasks_are_bounded() -> None:
    """Labels come from callers: the one not seen for longest is forgotten, and estimates go on."""
    model = AcceptanceModel([0.5])
    for label in range(200):
        model.observe(0, 0, True, f"task {label}")
        model.observe(0, 0, False, "busy")
    assert len(model._tasks) <= 64
    assert model.estimate(0, 0, "task 0") == model.estimate(0, 0)
    assert model.estimate(0, 0, "busy") < 0.2 < model.estimate(0, 0)


def test_ranks_beyond_the_table_share_its_last_place() -> None:
    """Any rank has an estimate."""
    model = AcceptanceModel([0.5])
    model.observe(0, 500, False)
    assert model.estimate(0, 100) < 0.5


def test_sharpness_starts_at_one_and_finds_the_best() -> None:
    """The sharpness whose winners are chosen most often is used, also after a change."""
    source = random.Random(3)
    fit = SharpnessFit()
    assert fit.value == 1.0
    for best in (5, 2):
        for _ in range(6000):
            right = [source.random() < 0.5 - 0.03 * abs(place - best) for place in range(len(SHARPNESS_GRID))]
            fit.observe([0 if hit else 1 for hit in right], chosen=0)
        assert abs(SHARPNESS_GRID.index(fit.value) - best) <= 1


def test_greedy_rows_teach_no_sharpness() -> None:
    """They have no winners."""
    fit = SharpnessFit()
    fit.observe((), 3)
    assert fit.value == 1.0
