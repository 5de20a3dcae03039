"""The product of one linear layer with a kernel of the project; `row_matmul`, `tile_matmul` and
`quantized_matmul` call one each.

It reads a weight once for many rows, computes the same bits for a row in every batch, and shares its work
with a worker pool. The weight is held in panels; see `outrider.engine.cpu.panels`.
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
"""Bytes of weights that are worth handing to another thread: waking one takes as long as reading half of
them."""
SHARES = 8
"""Parts per thread into which the work is cut. A busy core delays the rest by one part at most, and each part
costs a call. With 24 a weight of 4 MB takes 1.1 to 1.6 times as long (two cores of Zen 5)."""
WAYS, WAY_BYTES = 8, 4096
"""Ways that the nearest cache has at least, and bytes of a way: rows that are a multiple of WAY_BYTES apart
share cache sets."""
Part: TypeAlias = tuple[int, int, int, int]
"""Panels [first, end) for rows [start, stop)."""
Group: TypeAlias = tuple[int, int, int]
"""A weight, and the rows [start, stop) that it is multiplied with."""


class PanelProduct(ABC):
    """Rows times a weight in panels, whose work the worker pool shares."""

    pass_rows: ClassVar[int]
    """Rows that cost little more than one; the time grows in steps of this many rows."""
    max_rows: ClassVar[int]
    """Most rows of one pass over the weights; more rows take several passes."""
    shared_rows: ClassVar[int]
    """Most rows of a pass where there are too few panels to share them evenly."""

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
        """Columns of the result, and numbers of a row that is multiplied."""
        self._panels, self._panel_columns, self._size = len(weight), panel_columns, itemsize
        self._panel_bytes = weight.nbytes // self._panels
        self._bias_bytes = 0 if bias is None else bias.nbytes // self._panels
        self._weight_at = weight.data_ptr()
        self._bias_at = 0 if bias is None else bias.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, in] contiguous -> [R, out or its half], R >= 0. Not for several threads at once.

        Raises:
            ValueError: the rows have another width; the kernel would read past their end.
        """
        count, width = rows.shape
        if width != self.numbers:
            raise ValueError(f"rows of {width} numbers for a layer that takes {self.numbers}")
        return multiply_groups((self,), ((0, 0, count),), rows, self._workers.size(count))

    def _prepared(self, rows: Tensor) -> Tensor:
        """Return what the kernel reads in place of the rows: as many rows, `stride(0)` apart."""
        return rows

    def _parts(self, wanted: int, start: int, stop: int) -> list[Part]:
        """Return about `wanted` parts, or more, for rows [start, stop)."""
        most = self.shared_rows if self._panels < wanted else self.max_rows
        panels, passes = cut(0, self._panels, min(wanted, self._panels)), _passes(start, stop, most)
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
        """Run the kernel in a member's scratch memory on rows at `x`, `x_stride` bytes apart, and panels at
        `w`.

        The rest: how many panels, their bias, the result, bytes between its rows, its columns, and how many
        rows.
        """


def multiply_groups(
    products: Sequence[PanelProduct], groups: Sequence[Group], rows: Tensor, members: int
) -> Tensor:
    """[R, in] contiguous -> [R, out or its half]: the rows of each group times its weight.

    The products are of one kind and shape; at most `members` of their workers share the work. Groups follow
    each other.
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


def _passes(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """Cut rows [start, stop) into parts of at most `most` rows."""
    return cut(start, stop, -(-(stop - start) // most))


def cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into `count` parts [first, end) of about equal size."""
    whole = stop - start
    return list(pairwise(start + whole * part // max(count, 1) for part in range(count + 1)))
