"""Computes the choices and rankings of `outrider.sampling.chooser` with the CPU's kernels, row by row.

Importing this module compiles the kernels, or loads them. They keep the interpreter's lock: a row takes a
fraction of a millisecond, and another thread would keep the lock for longer.

Shapes: N rows, V vocabulary, G groups of tokens, K leaders of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import Ranking
from outrider.sampling.kernels.search import describe, find_maxima, lead
from outrider.sampling.kernels.truncation import LOWEST, RowTruncation, lowest_key, weight_of_all
from outrider.sampling.noise import GROUP
from outrider.sampling.processors import SamplingRow
from outrider.sampling.truncation import truncates
from outrider.speculation.acceptance import BUCKETS, EDGES, FLATNESS, SHARPNESS_GRID

_EDGES, _GRID = np.array(EDGES), np.array(SHARPNESS_GRID)


def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The best token of each row, from logits [N, V] float32 on the CPU."""
    search = _Search(logits.shape[1], 1)
    chosen = []
    for line, row in zip(_lines(logits), rows, strict=True):
        search.run(line, row, 1.0)
        chosen.append(int(search.tokens[0]))
    return chosen


def rank(
    logits: Tensor, rows: Sequence[SamplingRow], slopes: Sequence[float], rivals: int, count: int
) -> list[Ranking]:
    """The best `count` of K = `rivals` leaders of each row by `slope x logit / temperature + noise`.

    Takes logits [N, V] and slopes [N].
    """
    search = _Search(logits.shape[1], rivals)
    ranked = []
    for line, row, slope in zip(_lines(logits), rows, slopes, strict=True):
        top = search.run(line, row, slope)
        ranked.append(search.ranked(line, top, row.params, slope, count))
    return ranked


def _lines(logits: Tensor) -> NDArray[np.float32]:
    """The same logits as an array whose rows have no gaps."""
    lines: NDArray[np.float32] = (logits if logits.stride(1) == 1 else logits.contiguous()).numpy()
    return lines


class _Search:
    """Searches one row after the other, and holds the leaders of the last one."""

    def __init__(self, size: int, count: int) -> None:
        self.tokens = np.empty(count, np.int64)
        self._scores = np.empty(count)
        self._noises = np.empty(count)
        self._maxima = np.empty(-(-size // GROUP), np.float32)
        self._buckets = np.empty(count, np.int64)
        self._winners = np.empty(len(_GRID), np.int64)

    def run(self, line: NDArray[np.float32], row: SamplingRow, slope: float) -> float:
        """Find the leaders of a row [V]; returns its highest logit."""
        params = row.params
        top = find_maxima(line, self._maxima)
        lowest, scale = LOWEST, 1.0
        if not params.greedy:
            scale = slope / params.temperature
            if truncates(params):
                lowest = lowest_key(line, self._maxima, top, RowTruncation.of(params, len(line)))
        lead(
            *(line, self._maxima, lowest, scale, not params.greedy, params.seed, row.position),
            *(self.tokens, self._scores, self._noises),
        )
        return top

    def ranked(
        self, line: NDArray[np.float32], top: float, params: SamplingParams, slope: float, count: int
    ) -> Ranking:
        """The ranking of the leaders just found; see `chooser._rank_greedy` and `chooser._rank_sampled`."""
        greedy = params.greedy
        total = weight_of_all(line, top, 1.0) * 2.0**-40 if greedy else 0.0
        flatness = 1.0 if greedy else FLATNESS / min(params.temperature, 1.0)
        left = describe(
            *(self.tokens, self._scores, self._noises, total, flatness, slope),
            *(_EDGES, _GRID, self._buckets, self._winners),
        )
        self._buckets += 0 if greedy else BUCKETS // 2
        left, winners = min(left, count), () if greedy else tuple(self._winners.tolist())
        return Ranking(self.tokens[:left].tolist(), self._buckets[:left].tolist(), winners)
