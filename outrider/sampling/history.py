"""The tokens before a row, as penalties need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class History:
    """Distinct tokens of one session's prompt and output, with the count of each in the output.

    Sessions without penalties never build the statistics: tokens wait until `counts` asks for them.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._waiting: list[tuple[Sequence[int], int]] = [(prompt, 0), (output, 1)]
        self._places: dict[int, int] = {}
        self._tokens = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)

    def append(self, tokens: Sequence[int]) -> None:
        """Add committed output tokens."""
        self._waiting.append((tuple(tokens), 1))

    def extended(self, path: Sequence[int]) -> Path:
        """This history followed by the tokens on a node's path; valid until the next append."""
        return Path(self, tuple(path))

    def counts(self) -> tuple[Tensor, Tensor]:
        """Distinct tokens [U] int64 and their counts in the output [U] float32; do not write to them."""
        self._absorb()
        size = len(self._places)
        return torch.from_numpy(self._tokens[:size]), torch.from_numpy(self._counts[:size])

    def changes(self) -> Mapping[int, float]:
        """Output counts that differ from `counts` because of a path; empty here."""
        return {}

    def count_of(self, token: int) -> float:
        """The number of times that a token is in the output."""
        self._absorb()
        place = self._places.get(token)
        return 0.0 if place is None else float(self._counts[place])

    def _absorb(self) -> None:
        for tokens, weight in self._waiting:
            self._reserve(len(self._places) + len(tokens))
            for token in tokens:
                place = self._places.get(token)
                if place is None:
                    place = len(self._places)
                    self._places[token] = place
                    self._tokens[place] = token
                    self._counts[place] = 0.0
                self._counts[place] += weight
        self._waiting.clear()

    def _reserve(self, size: int) -> None:
        if size > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * size)
            self._counts = np.resize(self._counts, 2 * size)


@dataclass(frozen=True, slots=True)
class Path:
    """A history followed by a candidate path that is not yet committed."""

    base: History
    tokens: tuple[int, ...]

    def counts(self) -> tuple[Tensor, Tensor]:
        """The counts of the base history; `changes` has those that differ because of the path."""
        return self.base.counts()

    def changes(self) -> Mapping[int, float]:
        """Output counts of the tokens on the path."""
        changed: dict[int, float] = {}
        for token in self.tokens:
            changed[token] = changed.get(token, self.base.count_of(token)) + 1.0
        return changed
