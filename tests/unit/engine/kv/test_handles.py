"""Leases on kept sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.engine.kv.handles import MOVE_SECONDS, HandleTable, token_digest
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.protocol.errors import StaleHandle


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The table's time."""
    return Clock()


@pytest.fixture
def pool() -> PagePool:
    """Memory for a few short sequences."""
    return PagePool(16, 4)


@pytest.fixture
def table(pool: PagePool, clock: Clock) -> HandleTable:
    """Leases of a minute."""
    return HandleTable(pool, "verify-0", "a1", 60.0, clock, lambda: 1000.0)


def sequence(pool: PagePool, tokens: list[int]) -> SequenceKv:
    """A sequence with all of `tokens` committed."""
    kv = SequenceKv.open(pool, [])
    kv.reserve(len(tokens))
    kv.append(tokens, None)
    kv.commit(range(len(tokens)), tokens)
    return kv


def copied(kv: SequenceKv) -> SequenceKv:
    """What a runner's fork does, without tensors."""
    return kv.fork()[0]


def test_a_handle_describes_what_it_stands_for(table: HandleTable, pool: PagePool) -> None:
    """Owner, incarnation, length, digest and expiry are in the handle; scratch is not kept."""
    kv = sequence(pool, [1, 2, 3])
    kv.reserve(1)
    kv.append([4], None)
    handle = table.keep(kv)
    assert (handle.owner, handle.incarnation, handle.length) == ("verify-0", "a1", 3)
    assert handle.digest == token_digest([1, 2, 3])
    assert handle.expires_unix_ms == 1_060_000
    assert kv.scratch == 0


def test_a_handle_is_redeemed_once(table: HandleTable, pool: PagePool) -> None:
    """The sequence goes to the caller and the handle is spent."""
    kv = sequence(pool, [1, 2, 3])
    handle = table.keep(kv)
    assert table.take(handle) is kv
    with pytest.raises(StaleHandle, match="used already"):
        table.take(handle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owner": "verify-1"}, "belongs to replica"),
        ({"incarnation": "b2"}, "restarted"),
        ({"id": "none"}, "lease is over"),
        ({"length": 2}, "does not cover"),
        ({"digest": b"x" * 16}, "does not cover"),
    ],
)
def test_a_wrong_handle_is_refused_with_its_reason(
    table: HandleTable, pool: PagePool, change: dict[str, object], reason: str
) -> None:
    """Nothing is given out for a handle that does not fit, and the sequence stays kept."""
    handle = table.keep(sequence(pool, [1, 2, 3]))
    with pytest.raises(StaleHandle, match=reason):
        table.take(dataclasses.replace(handle, **change))
    assert len(table) == 1


def test_a_lease_ends(table: HandleTable, pool: PagePool, clock: Clock) -> None:
    """At its expiry the pages return and the handle is refused."""
    handle = table.keep(sequence(pool, [1, 2, 3]))
    clock.now += 59.9
    assert table.expire(clock.now) == 0
    clock.now += 0.1
    with pytest.raises(StaleHandle, match="lease is over"):
        table.take(handle)
    assert pool.statistics().used == 0


def test_expiry_spares_younger_leases(table: HandleTable, pool: PagePool, clock: Clock) -> None:
    """Only what is over is released."""
    table.keep(sequence(pool, [1]))
    clock.now += 30
    young = table.keep(sequence(pool, [2]))
    assert table.expire(clock.now + 30) == 1
    assert table.take(young).tokens == [2]


def test_a_fork_has_a_handle_of_its_own(table: HandleTable, pool: PagePool) -> None:
    """Both handles can be redeemed, for the same tokens."""
    first = table.keep(sequence(pool, [1, 2, 3, 4, 5]))
    second = table.fork(first, copied)
    assert second.id != first.id
    assert table.take(first).tokens == table.take(second).tokens == [1, 2, 3, 4, 5]


def test_release_gives_the_pages_back(table: HandleTable, pool: PagePool) -> None:
    """Releasing a handle is the end of it."""
    handle = table.keep(sequence(pool, [1, 2, 3]))
    table.release(handle)
    assert pool.statistics().used == 0
    with pytest.raises(StaleHandle):
        table.release(handle)


def test_the_oldest_is_given_up_first(table: HandleTable, pool: PagePool) -> None:
    """When pages are needed, the sequence nearest its expiry goes."""
    table.keep(sequence(pool, [1]))
    newer = table.keep(sequence(pool, [2]))
    assert table.release_oldest()
    assert table.take(newer).tokens == [2]
    assert not table.release_oldest()


def test_what_moves_is_counted_until_it_is_fetched(table: HandleTable, pool: PagePool, clock: Clock) -> None:
    """A replica that drains waits for it, but not long: its request may be over. Other handles do not
    count."""
    table.keep(sequence(pool, [1, 2, 3]))
    first, _ = (table.keep(sequence(pool, [1, 2, 3]), moves=True) for _ in range(2))
    assert table.moving == 2
    table.take(first).release()
    assert table.moving == 1
    clock.now += MOVE_SECONDS
    assert table.moving == 0
    assert len(table) == 2, "they may still be fetched"


def test_there_are_no_more_handles_than_pages(table: HandleTable, pool: PagePool) -> None:
    """Forks share full pages, and a session may be kept before it has any: the oldest give way."""
    first = table.keep(sequence(pool, [1, 2, 3, 4]))
    forks = [table.fork(first, copied) for _ in range(pool.num_pages - 1)]
    assert len(table) == pool.num_pages
    last = table.keep(SequenceKv.open(pool, [9]))
    assert len(table) == pool.num_pages
    with pytest.raises(StaleHandle):
        table.take(first)
    for handle in (*forks, last):
        table.release(handle)
    assert pool.statistics().used == 0


def test_states_of_kept_sequences_have_a_bound(pool: PagePool, clock: Clock) -> None:
    """They are large, and take no pages."""
    table = HandleTable(pool, "verify-0", "a1", 60.0, clock, lambda: 1000.0, max_state_bytes=40)
    handles = []
    for token in range(3):
        kv = sequence(pool, [token])
        kv.end_states = {0: torch.zeros(1, 4)}
        handles.append(table.keep(kv))
    with pytest.raises(StaleHandle):
        table.take(handles[0])
    assert [table.take(handle).tokens for handle in handles[1:]] == [[1], [2]]
