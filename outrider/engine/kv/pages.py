"""One sequence's KV memory: committed entries, the scratch tree after them, and the pages of both.

    [0, length)                   committed: valid, tokens known
    [length, length + scratch)    written by forwards since the last commit; entries form a tree
    [length + scratch, capacity)  allocated, unwritten

A scratch entry's offset counts from `length`; its parent is an earlier offset, or -1 for the last
committed token. Full committed pages may be shared and are never written; everything from the first
partial page on belongs only to this sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.engine.kv.page_pool import PagePool, PoolStatistics, chain
from outrider.protocol.errors import InternalError

__all__ = ["Move", "PagePool", "PoolStatistics", "SequenceKv", "Slots"]

Move: TypeAlias = tuple[int, int]
"""Copy the entry of one slot to another: (source, destination)."""
Slots: TypeAlias = npt.NDArray[np.int64]


class SequenceKv:
    """Pages, committed tokens and scratch tree of one sequence.

    Invariants: `len(tokens) == length`; parents come before children; `slots[i]` is the slot of entry i
    for all i below `capacity`; pages below `length // page_size` are full, and published unless the
    sequence was adopted or the pool shares none.
    """

    def __init__(self, pool: PagePool, tokens: Sequence[int], pages: list[int], end_key: bytes) -> None:
        self.pool = pool
        self.pages = pages
        self.tokens = list(tokens)
        self.scratch_tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        """Depths of the scratch entries; 1 for a child of the last committed token."""
        self.states: list[Any] = []
        """The states of recurrent layers after each scratch entry, where they have been computed."""
        self.end_states: Any = None
        """The states of recurrent layers after the last committed token."""
        self._slots: Slots = np.empty(0, dtype=np.int64)
        self._page_table: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """`pages` as an array, with room for more."""
        self._masks: list[int] | None = None
        """Per scratch entry a number whose bit c is set if entry c is the entry or one of its ancestors; None
        while the scratch is one chain."""
        self._published = len(tokens) // pool.page_size
        self._end_key = end_key
        self._private = False
        """True where no page is published: what another replica computed is used only for this sequence."""
        self._extend_slots(0)

    @classmethod
    def open(cls, pool: PagePool, tokens: Sequence[int], max_cached: int | None = None) -> SequenceKv:
        """Return a sequence that starts with the cached beginning of `tokens`, at most `max_cached` of them.

        At least the last token is left to compute, because its logits are wanted. `length` says how many
        tokens were found.
        """
        known = tokens[:-1] if max_cached is None else tokens[:-1][:max_cached]
        pages, end_key = pool.cached_prefix(known)
        pool.retain(pages)
        opened = cls(pool, tokens[: len(pages) * pool.page_size], pages, end_key)
        opened.end_states = pool.kept_states.find(end_key) if pages and pool.kept_states is not None else None
        return opened

    @classmethod
    def adopt(cls, pool: PagePool, tokens: Sequence[int]) -> SequenceKv:
        """Return a sequence whose entries for all of `tokens` are written by others. None of its pages is
        published.

        Raises:
            OutOfPages: too few pages are available; nothing changed.
        """
        adopted = cls(pool, tokens, pool.allocate(-(-len(tokens) // pool.page_size)), b"")
        adopted._private = True
        return adopted

    @property
    def length(self) -> int:
        """Committed entries."""
        return len(self.tokens)

    @property
    def scratch(self) -> int:
        """Entries written since the last commit."""
        return len(self.parents)

    @property
    def capacity(self) -> int:
        """Entries that the allocated pages hold."""
        return len(self.pages) * self.pool.page_size

    @property
    def slots(self) -> Slots:
        """[capacity] slot of every entry."""
        return self._slots[: self.capacity]

    @property
    def page_table(self) -> npt.NDArray[np.int64]:
        """[pages] `pages` as an array."""
        return self._page_table[: len(self.pages)]

    @property
    def is_chain(self) -> bool:
        """True while every scratch entry continues the one before it."""
        return self._masks is None

    def positions(self, start: int) -> npt.NDArray[np.int64]:
        """Return the absolute positions [scratch - start] of the scratch entries from `start` on."""
        if self._masks is None:
            return np.arange(self.length + start, self.length + self.scratch, dtype=np.int64)
        return np.array(self.depths[start:], dtype=np.int64) + (self.length - 1)

    def reserve(self, count: int) -> None:
        """Allocate pages so that `count` more scratch entries fit.

        Raises:
            OutOfPages: too few pages are available; nothing changed.
        """
        needed = self.length + self.scratch + count
        if needed > self.capacity:
            first = len(self.pages)
            self.pages.extend(self.pool.allocate(self._pages_for(needed) - first))
            self._extend_slots(first)

    def append(self, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        """Record `tokens` as the next scratch entries; room for them must be reserved.

        `parents` are scratch offsets, perhaps of earlier tokens of this call, or -1. None continues the end
        of the scratch with one chain.

        Raises:
            InternalError: a parent is not an earlier entry, or there is no room.
        """
        start, count = self.scratch, len(tokens)
        if self.length + start + count > self.capacity:
            raise InternalError(f"{count} scratch entries do not fit the {self.capacity} reserved entries")
        chained = range(start - 1, start + count - 1)
        if parents is None:
            deepest = self.depths[-1] if start else 0
            added, depths = list(chained), [*self.depths, *range(deepest + 1, deepest + 1 + count)]
        else:
            added, depths = list(parents), self._depths_with(parents)
        assert len(depths) == start + count, "tokens and parents differ in number"
        self.depths = depths
        self.scratch_tokens.extend(tokens)
        self.parents += added
        self.states += [None] * count
        if self._masks is not None:
            _extend_masks(self._masks, added)
        elif parents is not None and added != list(chained):
            self._masks = _extend_masks([], self.parents)

    def ancestors(self, start: int) -> npt.NDArray[np.bool_]:
        """Return [scratch - start, scratch]: whether the entry of the column is scratch entry start + row or
        one of its ancestors."""
        count = self.scratch
        if self._masks is None:
            return np.tri(count - start, count, start, dtype=np.bool_)
        width = -(-count // 8)
        packed = np.frombuffer(self.packed_ancestors(start, width), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(count - start, width), axis=1, count=count, bitorder="little")
        return bits.view(np.bool_)

    def packed_ancestors(self, start: int, width: int) -> bytes:
        """Return the rows of `ancestors` of a scratch that is no chain, each in `width` bytes, which hold all
        entries: bit c % 8 of byte c // 8 for entry c.
        """
        assert self._masks is not None, "what entries of a chain see is not kept"
        return b"".join([mask.to_bytes(width, "little") for mask in self._masks[start:]])

    def commit(self, keep: Sequence[int], tokens: Sequence[int], survivors: Sequence[int] = ()) -> list[Move]:
        """Make a path of scratch entries committed; keep `survivors` as the new scratch; forget the rest.

            before   [0, length) committed   [length, length + scratch)
            after    [0, length + k) committed   [length + k, length + k + s) survivors      k, s = counts

        `keep` is a path from the last committed token, `tokens` its ids. `survivors` descend from the end
        of that path, parents first. Newly full pages are published, pages no longer needed released.
        The returned moves must be carried out at once, all reads before all writes.

        Raises:
            InternalError: `keep` is not such a path, `tokens` are not its ids, or a survivor has lost its
                parent; nothing changed.
        """
        self._check_commit(keep, tokens, survivors)
        order = [*keep, *survivors]
        entries = self._slots[self.length : self.length + self.scratch]
        moves = [(int(entries[old]), int(entries[new])) for new, old in enumerate(order) if old != new]
        states = {self.length + place: self.states[old] for place, old in enumerate(keep, 1)}
        self.tokens.extend(tokens)
        self.end_states = states[self.length] if keep else self.end_states
        self._keep_scratch(survivors, len(keep))
        self._publish_full_pages(states)
        self._trim()
        return moves

    def rollback(self) -> None:
        """Forget all scratch entries."""
        self._keep_scratch((), 0)
        self._trim()

    def fork(self) -> tuple[SequenceKv, list[Move]]:
        """Return another sequence with the same committed tokens, and the moves that copy its partial page.

        Raises:
            OutOfPages: no page is left for the copy; nothing changed.
        """
        size = self.pool.page_size
        full, rest = divmod(self.length, size)
        tail = self.pool.allocate(1) if rest else []
        self.pool.retain(self.pages[:full])
        copy = SequenceKv(self.pool, self.tokens, self.pages[:full] + tail, self._end_key)
        copy._published, copy._private = self._published, self._private
        copy.end_states = self.end_states
        moves = [(self.pages[full] * size + i, tail[0] * size + i) for i in range(rest)]
        return copy, moves

    def release(self) -> None:
        """Give back every page; the sequence is empty afterwards. Doing it twice is harmless."""
        pages, self.pages = self.pages, []
        self.tokens.clear()
        self.end_states = None
        self._keep_scratch((), 0)
        self._published, self._end_key = 0, b""
        self.pool.release(pages)

    def _depths_with(self, parents: Sequence[int]) -> list[int]:
        """Return the depths of the scratch after entries with these parents are appended."""
        depths = list(self.depths)
        for offset, parent in enumerate(parents, self.scratch):
            if not -1 <= parent < offset:
                raise InternalError(f"scratch entry {offset} names {parent} as its parent")
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths

    def _check_commit(self, keep: Sequence[int], tokens: Sequence[int], survivors: Sequence[int]) -> None:
        if [self.scratch_tokens[offset] for offset in keep] != list(tokens):
            raise InternalError("the tokens to commit are not those of the kept scratch entries")
        if [self.parents[offset] for offset in keep] != [-1, *keep[:-1]][: len(keep)]:
            raise InternalError(f"the scratch entries {list(keep)} are not a path from the last token")
        known = {keep[-1] if keep else -1}
        for offset in survivors:
            if self.parents[offset] not in known:
                raise InternalError(f"scratch entry {offset} survives without its parent")
            known.add(offset)

    def _keep_scratch(self, survivors: Sequence[int], committed: int) -> None:
        """Reduce the scratch to `survivors`, now `committed` levels higher."""
        new_offset = {old: new for new, old in enumerate(survivors)}
        parents = [new_offset.get(self.parents[old], -1) for old in survivors]
        if self._masks is not None:
            linear = all(parent == offset - 1 for offset, parent in enumerate(parents))
            self._masks = None if linear else _extend_masks([], parents)
        self.scratch_tokens = [self.scratch_tokens[old] for old in survivors]
        self.depths = [self.depths[old] - committed for old in survivors]
        self.states = [self.states[old] for old in survivors]
        self.parents = parents

    def _publish_full_pages(self, states: Mapping[int, Any]) -> None:
        """Publish newly full pages, with the `states` of recurrent layers, which are keyed by length."""
        if self._private or not self.pool.sharing:
            return
        size = self.pool.page_size
        for index in range(self._published, self.length // size):
            self._end_key = chain(self._end_key, self.tokens[index * size : (index + 1) * size])
            self.pool.publish(self.pages[index], self._end_key)
            self._published = index + 1
            behind = states.get((index + 1) * size)
            if self.pool.kept_states is not None and behind is not None:
                self.pool.kept_states.keep(self._end_key, behind)

    def _trim(self) -> None:
        """Release the pages after the last entry."""
        needed = self._pages_for(self.length + self.scratch)
        unneeded = self.pages[needed:]
        del self.pages[needed:]
        self.pool.release(unneeded)

    def _pages_for(self, entries: int) -> int:
        return -(-entries // self.pool.page_size)

    def _extend_slots(self, first_page: int) -> None:
        """Fill in the page table and the slots of the pages from index `first_page` on."""
        size, count = self.pool.page_size, len(self.pages)
        if self._page_table.size < count:
            room = max(count, 2 * self._page_table.size)
            self._page_table = _grown(self._page_table[:first_page], room)
            self._slots = _grown(self._slots[: first_page * size], room * size)
        self._page_table[first_page:count] = self.pages[first_page:]
        added = self._page_table[first_page:count, None] * size + np.arange(size, dtype=np.int64)
        self._slots[first_page * size : count * size] = added.ravel()


def _grown(values: Slots, size: int) -> Slots:
    """Return an array of this size that begins with the values."""
    grown: Slots = np.empty(size, dtype=np.int64)
    grown[: len(values)] = values
    return grown


def _extend_masks(masks: list[int], parents: Sequence[int]) -> list[int]:
    """Add a mask for each further entry, which has these parents, and return all masks."""
    for offset, parent in enumerate(parents, len(masks)):
        masks.append(1 << offset | (masks[parent] if parent >= 0 else 0))
    return masks
