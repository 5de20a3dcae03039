"""Calculations over rows of logits as CUDA graphs: one launch in place of dozens.

Dozens can take the host longer than a small draft's forward takes the device. A graph reads fixed memory, so
a batch's logits and table are copied there first; it is padded to one of a few sizes, and padding is computed
for nobody. What is captured is what runs without a graph, so the results are the same.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.gpu.graphs import Graphs, Replay, bucket_of, buckets_up_to

MAX_ROWS = 32
"""More rows run without a graph: a draft seldom expands so many nodes at once."""
SIZES = buckets_up_to(MAX_ROWS)

log = logging.getLogger(__name__)


class _Captured(NamedTuple):
    table: Tensor
    replay: Replay


class Replays:
    """Graphs over the same room for logits of a vocabulary, made when their first batch comes."""

    def __init__(self, graphs: Graphs, vocabulary: int, device: torch.device) -> None:
        self._graphs: Graphs | None = graphs
        self._captured: dict[tuple[int, Hashable], _Captured] = {}
        self._lock = Lock()
        with torch.inference_mode(False):  # or it could not be used outside of it
            self._logits = torch.zeros((MAX_ROWS, vocabulary), device=device)

    def run(
        self,
        key: Hashable,
        logits: Tensor,
        table_of: Callable[[int], Tensor],
        calculate: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor | None:
        """What `calculate` makes of logits [N, V] and a table: [N, columns] on the host; None without graph.

        `table_of` gives the table of N rows and padding on the host; `key` is what else `calculate` depends
        on.
        """
        rows = bucket_of(len(logits), SIZES)
        if rows is None or self._graphs is None:
            return None
        table = table_of(rows)
        with self._lock:  # until the result is read: the next batch overwrites it
            self._logits[: len(logits)].copy_(logits)
            captured = self._captured.get((rows, key))
            if captured is None:
                captured = self._capture(self._graphs, (rows, key), table, calculate)
            else:
                captured.table.copy_(table, non_blocking=True)
            return None if captured is None else captured.replay()[: len(logits)].cpu()

    def _capture(
        self,
        graphs: Graphs,
        place: tuple[int, Hashable],
        table: Tensor,
        calculate: Callable[[Tensor, Tensor], Tensor],
    ) -> _Captured | None:
        with torch.inference_mode(False):
            fixed, logits = table.to(self._logits.device, copy=True), self._logits[: place[0]]
        try:
            captured = _Captured(fixed, graphs.capture(lambda: calculate(logits, fixed)))
        except RuntimeError as error:
            log.warning("rankings run without graphs: they cannot be captured (%s)", error)
            self._graphs = None
            return None
        self._captured[place] = captured
        return captured
