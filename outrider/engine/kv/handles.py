"""Sequences kept under a lease: `keep` takes a sequence and returns an opaque handle, `take` returns the
sequence.

A handle names a sequence of one process lifetime of one replica. Whoever redeems it gets the pages. A handle
that cannot be redeemed is refused with the reason, and the caller sends the tokens instead.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.engine.kv.kept_states import MAX_BYTES, copied, size_of
from outrider.engine.kv.pages import PagePool, SequenceKv
from outrider.protocol.errors import StaleHandle
from outrider.protocol.messages import KvHandle

MOVE_SECONDS = 10.0
"""Longest time for another replica to begin to fetch a sequence that is kept for it. Later nobody is
expected to: its request has been cancelled, or waits for a place, and a drain does not wait for that."""


def token_digest(tokens: Sequence[int]) -> bytes:
    """16 bytes that stand for exactly these tokens."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def check_covered(handle: KvHandle, tokens: Sequence[int]) -> None:
    """Raises StaleHandle unless the handle was given out for the first of these tokens."""
    if token_digest(tokens[: handle.length]) != handle.digest:
        raise StaleHandle("kv_handle: it does not cover the first of token_ids")


@dataclass(frozen=True, slots=True)
class _Kept:
    handle: KvHandle
    kv: SequenceKv
    expires: float
    """When its lease ends, by the table's clock."""
    moves_until: float
    """Time until which another replica is expected to fetch it, by the table's clock."""
    state_bytes: int
    """Bytes of its states of recurrent layers."""


class HandleTable:
    """Sequences kept for their next turn. Belongs to the engine thread, like the pool.

    There are at most as many handles as pages, though several may share a page, and at most
    `max_state_bytes` of states of recurrent layers. Beyond that the oldest handles are dropped.

    A lease restarts whenever a handle is given out. It is measured by `clock`, which never jumps;
    `wall_clock`, in Unix seconds, only tells the holder about when it ends.
    """

    def __init__(
        self,
        pool: PagePool,
        replica: str,
        incarnation: str,
        lease_seconds: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        max_state_bytes: int = MAX_BYTES,
    ) -> None:
        self.pool = pool
        self.replica = replica
        self.incarnation = incarnation
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_state_bytes, self._state_bytes = max_state_bytes, 0
        self._kept: dict[str, _Kept] = {}
        """Kept sequences by handle id, in the order of their expiry."""

    def __len__(self) -> int:
        return len(self._kept)

    def sequences(self) -> Iterator[SequenceKv]:
        """Every kept sequence, for integrity checks."""
        return (kept.kv for kept in self._kept.values())

    @property
    def moving(self) -> int:
        """Sequences that are kept for another replica."""
        now = self._clock()
        return sum(kept.moves_until > now for kept in tuple(self._kept.values()))

    def keep(self, kv: SequenceKv, moves: bool = False) -> KvHandle:
        """Take over `kv` without its scratch, and return a handle for it."""
        kv.rollback()
        kv.end_states = copied(kv.end_states)  # they may be a view of a batch's states
        handle = KvHandle(
            owner=self.replica,
            incarnation=self.incarnation,
            id=secrets.token_hex(16),
            length=kv.length,
            digest=token_digest(kv.tokens),
            expires_unix_ms=int((self._wall_clock() + self.lease_seconds) * 1000),
        )
        now, state_bytes = self._clock(), size_of(kv.end_states)
        moves_until = now + MOVE_SECONDS if moves else now
        self._kept[handle.id] = _Kept(handle, kv, now + self.lease_seconds, moves_until, state_bytes)
        self._state_bytes += state_bytes
        while self._too_many():
            self.release_oldest()
        return handle

    def take(self, handle: KvHandle) -> SequenceKv:
        """Redeem a handle: the sequence is the caller's now and the handle is spent.

        Raises:
            StaleHandle: another replica or incarnation, lease over, already redeemed, or other tokens.
        """
        return self._drop(self._find(handle).handle.id)

    def fork(self, handle: KvHandle, copy: Callable[[SequenceKv], SequenceKv]) -> KvHandle:
        """Return another handle for the same tokens; `copy` is the runner's fork. The first handle stays
        valid.

        Raises:
            StaleHandle: as for take.
            OutOfPages: no page is left for the copy.
        """
        return self.keep(copy(self._find(handle).kv))

    def release(self, handle: KvHandle) -> None:
        """Release the pages that a handle holds.

        Raises:
            StaleHandle: as for take.
        """
        self.take(handle).release()

    def expire(self, now: float) -> int:
        """Release every sequence whose lease is over at `now`; return how many."""
        kept = len(self)
        while self._kept and next(iter(self._kept.values())).expires <= now:
            self.release_oldest()
        return kept - len(self)

    def release_oldest(self) -> bool:
        """Release the sequence nearest its expiry, when pages are needed; return False when none is kept."""
        if not self._kept:
            return False
        self._drop(next(iter(self._kept))).release()
        return True

    def _drop(self, handle_id: str) -> SequenceKv:
        kept = self._kept.pop(handle_id)
        self._state_bytes -= kept.state_bytes
        return kept.kv

    def _too_many(self) -> bool:
        return len(self._kept) > self.pool.num_pages or self._state_bytes > self._max_state_bytes

    def _find(self, handle: KvHandle) -> _Kept:
        if handle.owner != self.replica:
            raise StaleHandle(f"kv_handle: belongs to replica {handle.owner!r}, this is {self.replica!r}")
        if handle.incarnation != self.incarnation:
            raise StaleHandle("kv_handle: this replica has restarted since")
        self.expire(self._clock())
        kept = self._kept.get(handle.id)
        if kept is None:
            raise StaleHandle("kv_handle: its lease is over or it was used already")
        if (handle.length, handle.digest) != (kept.handle.length, kept.handle.digest):
            raise StaleHandle("kv_handle: it does not cover the tokens it was given out for")
        return kept
