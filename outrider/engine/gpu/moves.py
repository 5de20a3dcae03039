"""Entries that commits move, gathered until the next step carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engine.kv.pages import Move


class PendingMoves:
    """Batches of moves that can be carried out together with the same effect as one after the other.

    A batch reads all its sources before it writes. Gathered batches may do so together as long as none reads
    or writes what an earlier one writes. If one does, `carry_out` first carries out the earlier ones.
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
        """Return the gathered moves for the caller to carry out; if there are more than `most`, carry them
        out here."""
        moves, self._moves = self._moves, []
        self._written = set()
        if len(moves) <= most:
            return moves
        self._carry_out(moves)
        return []
