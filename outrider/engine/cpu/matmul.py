"""The product of one linear layer with a kernel of the project; `row_matmul` and `tile_matmul` call theirs.

It reads a weight once for many rows, gives a row the same bits in every batch, and shares its work with a
worker pool. The weight is held in panels; see `outrider.engine.cpu.panels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, TypeAlias

from torch import Tensor

from outrider.engine.cpu.panels import PANEL, bias_in_panels, in_panels, paired
from outrider.engine.cpu.worker_pool import WorkerPool

MIN_SHARE = 2**21
"""Bytes of weights that are worth handing to another thread: to wake one takes as long as to read half."""
SHARES = 8
"""Parts into which the work is cut for each thread: a core that is busy holds up the rest by one of them, and
each takes a call. With 24 a weight of 4 MB takes 1.1 to 1.6 times as long (two cores of Zen 5)."""
WAYS, WAY_BYTES = 8, 4096
"""Ways of the nearest cache, at least, and bytes of a way: rows a multiple of them apart share sets."""
Part: TypeAlias = tuple[int, int, int, int]
"""Panels [first, end) for rows [start, stop)."""
Group: TypeAlias = tuple[int, int, int]
"""A weight, and the rows [start, stop) that it is multiplied with."""


class PanelProduct(ABC):
    """Rows times a weight in panels, whose work the worker pool shares."""

    pass_rows: ClassVar[int]
    """Rows that cost little more than one; the time grows in steps of so many."""
    max_rows: ClassVar[int]
    """Rows of one pass over the weights; more take several."""
    shared_rows: ClassVar[int]
    """Rows of a pass where the panels are too few to be shared evenly."""

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
        self._workers, self._weight, self._bias = workers, weight, bias
        self.gated = gated
        """The result is SiLU(gate) up of the weight's two halves."""
        self.columns, self.numbers = shape[0] // 2 if gated else shape[0], shape[1]
        """Of the result, and in a row that is multiplied."""
        self._panels, self._panel_columns, self._size = len(weight), panel_columns, itemsize
        self._panel_bytes = weight.nbytes // self._panels
        self._bias_bytes = 0 if bias is None else bias.nbytes // self._panels
        self._weight_at = weight.data_ptr()
        self._bias_at = 0 if bias is None else bias.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, in] contiguous -> [R, out or its half], R >= 0. Not for several threads at once.

        Raises:
            ValueError: the rows have another width; the kernel would read what lies behind them.
        """
        count, width = rows.shape
        if width != self.numbers:
            raise ValueError(f"rows of {width} numbers for a layer that takes {self.numbers}")
        return multiply_groups((self,), ((0, 0, count),), rows, self._workers.size(count))

    def _prepared(self, rows: Tensor) -> Tensor:
        """What the kernel reads in place of the rows: as many, `stride(0)` apart."""
        return rows

    def _parts(self, wanted: int, start: int, stop: int) -> list[Part]:
        """About as many parts as are wanted, or more, for rows [start, stop)."""
        most = self.shared_rows if self._panels < wanted else self.max_rows
        panels, passes = _cut(0, self._panels, min(wanted, self._panels)), _passes(start, stop, most)
        return [(*share, *some) for some in passes for share in panels]

    def _part(self, member: int, part: Part, x: int, x_stride: int, y: int) -> None:
        """Compute a part for the rows at address x into the result at y."""
        first, end, start, stop = part
        column = first * self._panel_columns
        y_stride = self._size * self.columns
        self._multiply(
            member,
            x + start * x_stride,
            x_stride,
            self._weight_at + first * self._panel_bytes,
            end - first,
            self._bias_at and self._bias_at + first * self._bias_bytes,
            y + start * y_stride + self._size * column,
            y_stride,
            self.columns - column,
            stop - start,
        )

    @abstractmethod
    def _multiply(self, member: int, x: int, x_stride: int, w: int, *rest: int) -> None:
        """Run the kernel in a member's room on rows at `x`, `x_stride` bytes apart, and panels at `w`.

        The rest: how many panels, their bias, the result, bytes between its rows, its columns, and how many
        rows.
        """


def multiply_groups(
    products: Sequence[PanelProduct], groups: Sequence[Group], rows: Tensor, members: int
) -> Tensor:
    """[R, in] contiguous -> [R, out or its half]: the rows of each group times its weight.

    The products are of one kind and shape; at most so many of their workers share them. Groups follow each
    other.
    """
    first = products[0]
    result = rows.new_empty(len(rows), first.columns)
    read = first._prepared(rows)
    at = read.data_ptr(), read.stride(0) * read.itemsize, result.data_ptr()
    size = min(members, max(1, len(groups) * first._weight.nbytes // MIN_SHARE))
    if size == 1:
        for which, start, stop in groups:
            product = products[which]
            for some in _passes(start, stop, product.max_rows):
                product._part(0, (0, product._panels, *some), *at)
        return result
    wanted = -(-size * SHARES // max(1, len(groups)))
    parts = [
        (products[which], part)
        for which, start, stop in groups
        for part in products[which]._parts(wanted, start, stop)
    ]
    first._workers.share(size, parts, lambda member, part: part[0]._part(member, part[1], *at))
    return result


class Matmul(PanelProduct):
    """`x @ weight.T + bias`, and with `gated` SiLU(gate) up of its two halves.

    `weight` [out, in] and `bias` [out] or None, of a dtype that the kernel takes; a row of `weight` takes a
    multiple of 4 bytes. Work is shared by the worker pool. `passing` weights are of a model that does not fit
    the cache which the cores share.
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
    """Rows [R, in] for a kernel that reads a line of each in turn. Where more of these share a cache set than
    it has ways, each row has a line of padding."""
    count, width = rows.shape
    if count <= WAYS or width * rows.itemsize % WAY_BYTES:
        return rows
    copy = rows.new_empty(count, width + 64 // rows.itemsize)[:, :width]
    return copy.copy_(rows)


def _passes(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """Parts of at most so many rows."""
    return _cut(start, stop, -(-(stop - start) // most))


def _cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """`count` parts [first, end) of about one size."""
    whole = stop - start
    return list(pairwise(start + whole * part // max(count, 1) for part in range(count + 1)))
