"""Sequences that are set aside while their pages are read or written outside of the engine thread.

    lent       taken from a handle, which is spent; released at the end of the transfer, however it ends
    reserved   pages for a sequence of another replica; becomes a kept sequence, or is released

The table belongs to the engine thread. The event loop numbers the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.engine.kv.handles import HandleTable
from outrider.engine.kv.pages import SequenceKv
from outrider.protocol.messages import KvHandle


@dataclass(frozen=True, slots=True)
class SetAside:
    """A sequence whose pages no step touches until it is dropped."""

    number: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    recompute_seconds: float = 0.0
    """About how long computing all these tokens would take."""


class TransferTable:
    """All sequences that are set aside, by the number of their transfer.

    `make_room` releases what no session needs until a number of tokens fits, or raises OutOfPages. `estimate`
    returns the seconds that computing a number of tokens takes. `settle` carries out the moves that the
    runner has put off, so that pages hold what their sequences say.
    """

    def __init__(
        self,
        handles: HandleTable,
        make_room: Callable[[int], None],
        estimate: Callable[[int], float],
        settle: Callable[[], None],
    ) -> None:
        self._handles = handles
        self._make_room = make_room
        self._estimate = estimate
        self._settle = settle
        self._sequences: dict[int, SequenceKv] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def sequences(self) -> Iterator[SequenceKv]:
        """Every sequence that is set aside, for integrity checks."""
        return iter(self._sequences.values())

    def lend(self, number: int, handle: KvHandle) -> SetAside:
        """Set a kept sequence aside to be read; its handle is spent.

        Raises:
            StaleHandle: see `HandleTable.take`.
        """
        return self._add(number, self._handles.take(handle))

    def reserve(self, number: int, tokens: Sequence[int]) -> SetAside:
        """Set pages aside for a sequence to be written.

        Raises:
            OutOfPages: too few pages are available.
        """
        self._make_room(len(tokens))
        return self._add(number, SequenceKv.adopt(self._handles.pool, tokens))

    def keep(self, number: int) -> KvHandle:
        """Keep a sequence that has been written; return a handle for it."""
        return self._handles.keep(self._sequences.pop(number))

    def drop(self, number: int) -> None:
        """End a transfer: release its sequence unless it was kept."""
        kv = self._sequences.pop(number, None)
        if kv is not None:
            kv.release()

    def _add(self, number: int, kv: SequenceKv) -> SetAside:
        self._settle()
        self._sequences[number] = kv
        return SetAside(number, tuple(kv.tokens), tuple(kv.pages), self._estimate(kv.length))
