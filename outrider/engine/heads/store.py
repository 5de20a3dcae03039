"""Keys and values of one text's rows, and which of them a row of a tree sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 64
"""Rows that a store has room for at first."""


class RowStore:
    """Entries [L, ...], keys and values of the rows of a text; grows by doubling."""

    def __init__(self) -> None:
        self._entries = torch.empty(0)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def entries(self) -> Tensor:
        """[L, ...]."""
        return self._entries[: self._count]

    def append(self, entries: Tensor) -> None:
        """Add entries [N, ...]."""
        count = self._count + len(entries)
        if count > len(self._entries):
            room = max(SMALLEST, 1 << (count - 1).bit_length())
            grown = entries.new_empty((room, *entries.shape[1:]))
            if self._count:
                grown[: self._count] = self.entries
            self._entries = grown
        self._entries[self._count : count] = entries
        self._count = count


def seen_in_tree(text: int, paths: Sequence[Sequence[int]], columns: Sequence[int]) -> Tensor:
    """Return what rows below a text see, [rows, text + columns] bool: all of the text, and those nodes in
    `columns` that are on their own path."""
    place = {node: text + column for column, node in enumerate(columns)}
    seen = torch.zeros(len(paths), text + len(columns), dtype=torch.bool)
    seen[:, :text] = True
    for row, path in enumerate(paths):
        seen[row, [place[node] for node in path]] = True
    return seen
