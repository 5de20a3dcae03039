"""Entries that commits move, gathered until the next step carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engine.kv.pages import Move


class PendingMoves:
    """Batches of moves that together mean the same as one after the other.

    A batch reads all its sources before it writes; so do the gathered ones, as long as none reads or writes
    what an earlier one has written. Then the earlier ones are carried out first, by `carry_out`.
    """

    def __init__(self, carry_out: Callable[[Sequence[Move]], None]) -> None:
        self._carry_out = carry_out
        self._moves: list[Move] = []
        self._written: set[int] = set()

    def add(self, moves: Sequence[Move]) -> None:
        """Gather one batch."""
        if any(source in self._written or target in self._written for source, target in moves):
            self._carry_out(self.take(len(self._moves)))
        self._moves.extend(moves)
        self._written.update(target for _, target in moves)

    def take(self, most: int) -> list[Move]:
        """The gathered moves, which are the caller's to carry out; more than `most` are carried out here."""
        moves, self._moves = self._moves, []
        self._written = set()
        if len(moves) <= most:
            return moves
        self._carry_out(moves)
        return []
