"""The product of one linear layer with a kernel of the project; `row_matmul`, `tile_matmul` and
`quantized_matmul` call one each.

It reads a weight once for many rows, computes the same bits for a row in every batch, and shares its work
with a worker pool. The weight is held in panels; see `outrider.engine.cpu.panels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from outrider.engine.cpu.panels import PANEL, bias_in_panels, in_panels, paired
from outrider.engine.cpu.recording import launch
from outrider.engine.cpu.worker_pool import WorkerPool

MIN_SHARE = 2**19
"""Bytes of weights that are worth handing to another thread. On a Zen 3 two threads take 0.9 of the time of
one for two times as many bytes and one row, 0.8 for eight rows."""
SHARES = 8
"""Parts per thread into which the work is cut: a busy core delays the rest by one part at most. With 24
products took as long (two cores of a Zen 3)."""
WAYS, WAY_BYTES = 8, 4096
"""Ways that the nearest cache has at least, and bytes of a way: rows that are a multiple of WAY_BYTES apart
share cache sets."""


class PanelProduct(ABC):
    """Rows times a weight in panels, whose work the worker pool shares."""

    pass_rows: ClassVar[int]
    """Rows that cost little more than one; the time grows in steps of this many rows."""
    max_rows: ClassVar[int]
    """Most rows of one pass over the weights; more rows take several passes."""
    shared_rows: ClassVar[int]
    """Most rows of a pass where there are too few panels to share them evenly."""
    _kernel: Callable[..., None]
    """Computes parts of jobs, which `outrider.engine.cpu.kernels.parts` describes."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        workers: WorkerPool,
        shape: tuple[int, int],
        *,
        gated: bool,
        panel_columns: int,
        itemsize: int,
    ) -> None:
        """`weight` [panels, ...] is as the kernel reads it, `bias` [panels * columns of a panel] float32, and
        `shape` (out, in). A panel makes `panel_columns` columns of the result, the last one perhaps fewer;
        numbers of rows and result have `itemsize` bytes.
        """
        self._workers, self._bias = workers, bias
        self.gated = gated
        """The result is SiLU(gate) up of the weight's two halves."""
        self.columns, self.numbers = shape[0] // 2 if gated else shape[0], shape[1]
        """Columns of the result, and numbers of a row that is multiplied."""
        self._panels, self._panel_columns, self._size = len(weight), panel_columns, itemsize
        self._panel_bytes = weight.nbytes // self._panels
        self._bias_bytes = 0 if bias is None else bias.nbytes // self._panels
        self._hold(weight)
        self._bias_at = 0 if bias is None else bias.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, in] contiguous -> [R, out or its half], R >= 0. Not for several threads at once.

        Raises:
            ValueError: the rows have another width; the kernel would read past their end.
        """
        count, width = rows.shape
        if width != self.numbers:
            raise ValueError(f"rows of {width} numbers for a layer that takes {self.numbers}")
        result, read = rows.new_empty(count, self.columns), self._prepared(rows)
        x, x_stride, y = read.data_ptr(), read.stride(0) * read.itemsize, result.data_ptr()
        y_stride = result.stride(0) * result.itemsize
        size = min(self._workers.size(count), max(1, self._weight.nbytes // MIN_SHARE))
        wanted = size * SHARES if size > 1 else 1
        shares = min(wanted, self._panels)
        most = self.max_rows if shares == wanted else self.shared_rows
        table, passes = array("q"), _passes(count, most)
        for low, high in passes:
            table.extend(self._job(shares, x + x_stride * low, x_stride, high - low, y + y_stride * low))
        self._workers.run(self._kernel, table, len(passes) * shares, size)
        return result

    def _hold(self, weight: Tensor) -> None:
        """Read this tensor, which has the weight's numbers, from now on."""
        assert weight.data_ptr() % 64 == 0, "kernels read whole cache lines"
        self._weight, self._weight_at = weight, weight.data_ptr()

    def _prepared(self, rows: Tensor) -> Tensor:
        """Return what the kernel reads in place of the rows: as many rows, `stride(0)` apart."""
        return rows

    @abstractmethod
    def _own_numbers(self, rows: int) -> Sequence[int]:
        """Return those numbers of a job with some rows that only this kernel has."""

    def _job(self, shares: int, x: int, x_stride: int, rows: int, y: int) -> list[int]:
        """Return the numbers of a job: to multiply rows at x into the result at y, in `shares` shares. See
        `outrider.engine.cpu.kernels.parts`."""
        columns = self._panel_columns
        numbers = [
            *(shares, self._panels, x, x_stride, rows, self._weight_at, self._panel_bytes),
            *(self._bias_at, self._bias_bytes, y, self._size * self.columns, self.columns, columns),
            *(self._size * columns, int(self.gated), *self._own_numbers(rows)),
        ]
        return [1 + len(numbers), *numbers]


class StackedProducts:
    """Rows times weights of which each has other rows. A kernel finds out which, and writes the jobs."""

    def __init__(self, products: Sequence[PanelProduct]) -> None:
        """The products, one for each of E weights, are of one kind and shape."""
        from outrider.engine.cpu.kernels.parts import write_jobs

        self.products, self._first, self._write = products, products[0], write_jobs
        for product, weight in zip(products, torch.stack([each._weight for each in products]), strict=True):
            product._hold(weight)  # small weights get huge pages only together
        self._jobs = torch.tensor([product._job(1, 0, 0, 1, 0) for product in products])
        """[E, numbers of a job]: the job of each weight for one row."""
        own = [self._first._own_numbers(rows) for rows in range(1, self._first.max_rows + 1)]
        self._own = torch.tensor(own)
        """The numbers [rows - 1, own ones] of a job with some rows."""
        self._parts = torch.zeros(1, dtype=torch.int64)

    def __call__(self, rows: Tensor, ends: Tensor, members: int) -> Tensor:
        """[R, in] contiguous, `ends` [E] int64 -> [R, out or its half].

        The first ends[0] rows are multiplied by the first weight, those up to ends[1] by the second, and so
        on; at most `members` of the workers share the work.
        """
        first, count = self._first, len(rows)
        result, read = rows.new_empty(count, first.columns), first._prepared(rows)
        most, least = min(count, len(self.products)), min(first.max_rows, first.shared_rows)
        jobs = torch.empty(most + count // least, self._jobs.shape[1], dtype=torch.int64)
        size = min(members, max(1, most * first._weight.nbytes // MIN_SHARE))
        launch(
            self._write,
            *(ends.data_ptr(), len(self.products), self._jobs.data_ptr(), self._jobs.shape[1]),
            *(self._own.data_ptr(), self._own.shape[1], first._panels, size * SHARES if size > 1 else 1),
            *(first.max_rows, first.shared_rows, read.data_ptr(), read.stride(0) * read.itemsize),
            *(result.data_ptr(), result.stride(0) * result.itemsize, jobs.data_ptr(), self._parts.data_ptr()),
        )
        first._workers.run_written(first._kernel, jobs, self._parts, size)
        return result


class Matmul(PanelProduct):
    """`x @ weight.T + bias`, and with `gated` SiLU(gate) up of its two halves.

    `weight` [out, in] and `bias` [out] or None have a dtype that the kernel takes; a row of `weight` takes a
    multiple of 4 bytes. The worker pool shares the work. `passing` weights belong to a model that does not
    fit into the cores' shared cache.
    """

    multiple: ClassVar[int]
    """The number of steps in a panel is a multiple of this."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        workers: WorkerPool,
        *,
        gated: bool = False,
        passing: bool = False,
    ) -> None:
        self._passing, shape, size = passing, weight.shape, weight.itemsize
        if gated:
            weight, bias = paired(weight), None if bias is None else paired(bias)
        held = in_panels(weight, self.multiple)
        self._steps = held.shape[1]
        super().__init__(
            held,
            None if bias is None else bias_in_panels(bias),
            workers,
            (shape[0], shape[1]),
            gated=gated,
            panel_columns=PANEL // 2 if gated else PANEL,
            itemsize=size,
        )


def padded(rows: Tensor) -> Tensor:
    """Rows [R, in] for a kernel that reads a cache line of each in turn. Where more of these lines share a
    cache set than it has ways, each row gets a line of padding."""
    count, width = rows.shape
    if count <= WAYS or width * rows.itemsize % WAY_BYTES:
        return rows
    copy = rows.new_empty(count, width + 64 // rows.itemsize)[:, :width]
    return copy.copy_(rows)


def _passes(rows: int, most: int) -> list[tuple[int, int]]:
    """Cut rows into passes [first, end) of at most `most` rows and about equal size."""
    count = -(-rows // most)
    return list(pairwise(rows * part // max(count, 1) for part in range(count + 1)))
