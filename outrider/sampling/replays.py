"""Runs calculations over rows of logits as CUDA graphs: one launch in place of dozens.

Dozens of launches can take the host longer than a small draft's forward takes the device. A graph reads fixed
memory, so a batch's logits and table are copied there first. The batch is padded to one of a few sizes, and
the results for the padding are ignored. The captured calculation is the one that runs without a graph, so the
results are the same.

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

MAX_ROWS = 64
"""Most rows of a graph; larger batches, which drafts rarely have, run without one."""
SIZES = buckets_up_to(MAX_ROWS)

log = logging.getLogger(__name__)


class _Captured(NamedTuple):
    table: Tensor
    replay: Replay


class Replays:
    """Graphs that share memory for the logits of one vocabulary; each is made when its first batch comes."""

    def __init__(self, graphs: Graphs, vocabulary: int, device: torch.device) -> None:
        self._graphs: Graphs | None = graphs
        self._captured: dict[tuple[int, Hashable], _Captured] = {}
        self._lock = Lock()
        with torch.inference_mode(False):  # otherwise the tensor could not be used outside of that mode
            self._logits = torch.zeros((MAX_ROWS, vocabulary), device=device)

    def run(
        self,
        key: Hashable,
        logits: Tensor,
        table_of: Callable[[int], Tensor],
        calculate: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor | None:
        """The result of `calculate` for logits [N, V] and a table: [N, columns] on the host; None if there is
        no graph.

        `table_of` makes the table for a number of rows, padding included, on the host; `key` holds everything
        else that `calculate` depends on.
        """
        rows = bucket_of(len(logits), SIZES)
        if rows is None or self._graphs is None:
            return None
        table = table_of(rows)
        with self._lock:  # held until the result is read, since the next batch overwrites it
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
