"""The product of one linear layer with a kernel of the project; `row_matmul` and `tile_matmul` call theirs.

It reads a weight once for many rows, gives a row the same bits in every batch, and shares its work with a
worker pool. The weight is held in panels; see `outrider.engine.cpu.panels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from itertools import pairwise
from typing import ClassVar, TypeAlias

from torch import Tensor

from outrider.engine.cpu.panels import (
    PANEL,
    PANEL_STEP_BYTES,
    bias_in_panels,
    in_panels,
    paired,
)
from outrider.engine.cpu.worker_pool import WorkerPool

MIN_SHARE = 2**20
"""Bytes of weights that are worth handing to another thread."""
SHARES = 24
"""Into which the work is cut for each thread."""
Part: TypeAlias = tuple[int, int, int, int]
"""Panels [first, end) for rows [start, stop)."""


class Matmul(ABC):
    """`x @ weight.T + bias`, and with `gated` SiLU(gate) up of its two halves.

    `weight` [out, in] and `bias` [out] or None, of a dtype that the kernel takes; a row of `weight` takes a
    multiple of 4 bytes. Work is shared by the worker pool. `passing` weights are of a model that does not fit
    the cache which the cores share.
    """

    pass_rows: ClassVar[int]
    """Rows that cost little more than one; the time grows in steps of so many."""
    max_rows: ClassVar[int]
    """Rows of one pass over the weights; more take several."""
    shared_rows: ClassVar[int]
    """Rows of a pass where the panels are too few to be shared evenly."""
    multiple: ClassVar[int]
    """Of steps in a panel."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        workers: WorkerPool,
        *,
        gated: bool = False,
        passing: bool = False,
    ) -> None:
        self._workers, self._gated, self._passing = workers, gated, passing
        self._size = weight.itemsize
        self._numbers = weight.shape[1]
        self._columns = weight.shape[0] // 2 if gated else weight.shape[0]
        if gated:
            weight, bias = paired(weight), None if bias is None else paired(bias)
        self._weight = in_panels(weight, self.multiple)
        self._bias = None if bias is None else bias_in_panels(bias)
        self._panels, self._steps = self._weight.shape[:2]
        self._panel_columns = PANEL // 2 if gated else PANEL
        self._weight_at = self._weight.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, in] contiguous -> [R, out or its half], R >= 0. Not for several threads at once.

        Raises:
            ValueError: the rows have another width; the kernel would read what lies behind them.
        """
        count, width = rows.shape
        if width != self._numbers:
            raise ValueError(f"rows of {width} numbers for a layer that takes {self._numbers}")
        result = rows.new_empty(count, self._columns)
        size = min(self._workers.size(count), max(1, self._weight.nbytes // MIN_SHARE))
        x, y = rows.data_ptr(), result.data_ptr()
        if size == 1:
            for start, stop in _cut(count, -(-count // self.max_rows)):
                self._part(0, (0, self._panels, start, stop), x, y)
        else:
            self._workers.share(size, self._parts(size * SHARES, count), partial(self._part, x=x, y=y))
        return result

    def _parts(self, wanted: int, rows: int) -> list[Part]:
        """About as many parts as are wanted, or more."""
        most = self.shared_rows if self._panels < wanted else self.max_rows
        panels, passes = _cut(self._panels, min(wanted, self._panels)), _cut(rows, -(-rows // most))
        return [(*share, *some) for some in passes for share in panels]

    def _part(self, member: int, part: Part, x: int, y: int) -> None:
        """Compute a part for the rows at address x into the result at y."""
        first, end, start, stop = part
        row_bytes, column = self._size * self._numbers, first * self._panel_columns
        y_stride = self._size * self._columns
        self._multiply(
            member,
            x + start * row_bytes,
            row_bytes,
            self._weight_at + first * self._steps * PANEL_STEP_BYTES,
            end - first,
            self._bias_at and self._bias_at + 4 * first * PANEL,
            y + start * y_stride + self._size * column,
            y_stride,
            self._columns - column,
            stop - start,
        )

    @abstractmethod
    def _multiply(
        self,
        member: int,
        x: int,
        x_stride: int,
        w: int,
        panels: int,
        bias: int,
        y: int,
        y_stride: int,
        columns: int,
        rows: int,
    ) -> None:
        """Run the kernel in a member's room; the arguments are addresses, bytes and counts."""


def _cut(whole: int, count: int) -> list[tuple[int, int]]:
    """`count` parts [first, end) of about one size."""
    return list(pairwise(whole * part // max(count, 1) for part in range(count + 1)))
