"""States that are kept for sequences that begin alike."""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.kv.kept_states import KeptStates, joined, part, size_of, tensors_of
from outrider.engine.kv.page_pool import page_keys
from outrider.engine.kv.pages import PagePool, SequenceKv

PAGE = 4


def states(number: float) -> Any:
    """Of one layer: 16 bytes."""
    return {0: {"recurrent": {0: torch.full((1, 4), number)}, "known": True, "device": None}}


def test_states_join_to_a_batch_and_part_again() -> None:
    """What is no tensor is the first one's."""
    batch = joined([states(1.0), states(2.0)])
    assert batch[0]["recurrent"][0].shape == (2, 4)
    assert batch[0]["known"] is True
    assert [tensor.tolist() for tensor in tensors_of(part(batch, 1))] == [[[2.0] * 4]]


def test_the_least_recently_used_give_way() -> None:
    """Room for two: the one that was found last stays."""
    kept = KeptStates(max_bytes=2 * size_of(states(0.0)))
    kept.keep(b"a", states(1.0))
    kept.keep(b"b", states(2.0))
    kept.find(b"a")
    kept.keep(b"c", states(3.0))
    assert [key in kept for key in (b"a", b"b", b"c")] == [True, False, True]


def test_what_does_not_fit_at_all_leaves_the_others() -> None:
    """It is not kept, and nothing gives way to it."""
    kept = KeptStates(max_bytes=2 * size_of(states(0.0)))
    kept.keep(b"a", states(1.0))
    kept.keep(b"b", joined([states(2.0)] * 3))
    assert [key in kept for key in (b"a", b"b")] == [True, False]


def test_what_is_kept_is_a_copy() -> None:
    """It neither changes with the first one nor holds its memory."""
    kept, batch = KeptStates(), joined([states(1.0), states(2.0)])
    kept.keep(b"a", part(batch, 0))
    batch[0]["recurrent"][0].zero_()
    (tensor,) = tensors_of(kept.find(b"a"))
    assert tensor.tolist() == [[1.0] * 4]
    assert tensor.untyped_storage().nbytes() == 16


def test_a_prefix_ends_where_states_are_known() -> None:
    """Two full pages are published, and of the first alone the states are there."""
    pool = PagePool(8, PAGE)
    pool.kept_states = KeptStates()
    kv = SequenceKv.open(pool, [])
    kv.reserve(2 * PAGE)
    kv.append(range(2 * PAGE), None)
    kv.states[PAGE - 1] = states(1.0)
    kv.commit(range(2 * PAGE), list(range(2 * PAGE)))
    other = SequenceKv.open(pool, [*range(2 * PAGE), 5])
    assert other.length == PAGE
    assert [tensor.tolist() for tensor in tensors_of(other.end_states)] == [[[1.0] * 4]]
    assert SequenceKv.open(pool, [9] * 9).end_states is None


def test_states_of_withdrawn_pages_are_computed_again() -> None:
    """Who publishes the same tokens later has its own states kept."""
    pool = PagePool(8, PAGE)
    pool.kept_states = KeptStates()
    for number in (1.0, 2.0):
        kv = SequenceKv.open(pool, range(5))
        assert kv.length == 0
        kv.reserve(PAGE)
        kv.append(range(PAGE), None)
        kv.states = [states(number)] * PAGE
        kv.commit(range(PAGE), range(PAGE))
        found = SequenceKv.open(pool, range(5))
        assert found.end_states[0]["recurrent"][0].tolist() == [[number] * 4]
        pool.withdraw(kv.pages)
        pool.check_integrity([kv, found])
        for each in (kv, found):
            each.release()
    assert pool.statistics().free == 8


def test_no_states_are_kept_where_no_pages_are_shared() -> None:
    """Nobody would find them, and they take as much memory as they may."""
    pool = PagePool(8, PAGE)
    pool.kept_states, pool.sharing = KeptStates(), False
    kv = SequenceKv.open(pool, [])
    kv.reserve(PAGE)
    kv.append(range(PAGE), None)
    kv.states[:] = [states(1.0)] * PAGE
    kv.commit(range(PAGE), range(PAGE))
    assert next(page_keys(range(PAGE), PAGE)) not in pool.kept_states
