"""Gathered moves mean the same as moves carried out one batch after the other."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.gpu.runner import PendingMoves


def apply(memory: list[int], moves) -> None:
    """All reads before all writes."""
    values = [memory[source] for source, _ in moves]
    for value, (_, target) in zip(values, moves, strict=True):
        memory[target] = value


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_batches_ends_the_same(seed):
    """Batches that read and overwrite what earlier ones wrote, against carrying each out at once."""
    random = np.random.default_rng(seed)
    eager, late = list(range(12)), list(range(12))
    pending = PendingMoves(lambda moves: apply(late, moves))
    for _ in range(30):
        count = int(random.integers(0, 5))
        targets = random.choice(12, count, replace=False).tolist()
        batch = list(zip(random.integers(0, 12, count).tolist(), targets, strict=True))
        apply(eager, batch)
        pending.add(batch)
        if random.random() < 0.2:
            apply(late, pending.take(8))
    apply(late, pending.take(8))
    assert late == eager


def test_moves_apart_wait():
    """Batches that do not meet are handed out together, and only once."""
    carried: list[object] = []
    pending = PendingMoves(carried.append)
    pending.add([(1, 2)])
    pending.add([(3, 1)])
    assert pending.take(8) == [(1, 2), (3, 1)]
    assert pending.take(8) == []
    assert not carried


def test_more_than_fit_are_carried_out():
    """Nothing is left to the caller then."""
    carried: list[object] = []
    pending = PendingMoves(carried.append)
    pending.add([(1, 2), (3, 4)])
    assert pending.take(1) == []
    assert carried == [[(1, 2), (3, 4)]]


def test_all_can_be_carried_out_at_once():
    """Before another thread reads or writes pages, none may be put off."""
    carried: list[object] = []
    pending = PendingMoves(carried.append)
    assert pending.take(0) == []
    pending.add([(1, 2)])
    assert pending.take(0) == []
    assert carried == [[(1, 2)]]
