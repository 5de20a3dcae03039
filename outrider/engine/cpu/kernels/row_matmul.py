"""`Y = X W^T + b` with AVX-512 or AVX2, for few rows X and many weights W.

A step of the target reads every weight once and has little to compute with each; what takes time is the
memory. While a panel of weights is multiplied with up to GROUP rows, the memory ahead is already being
fetched, so that GROUP rows cost little more than one. More rows are several groups; each fetches its share.

    panel      PANEL columns of W^T, one after the other in memory, read once from front to back
    step       4 bytes of every column of the panel, which are two numbers of 16 bits or one float32, and as
               many numbers of a row
    group      up to GROUP rows, whose sums stay in registers
    block      BLOCK steps of a panel, which stay in the nearest cache while several groups take turns

Processors without AVX-512 BF16 multiply float32 only, and none multiplies float16. So rows are given as
float32 there, and the two numbers of a step are taken apart and multiplied one after the other. With AVX2 up
to three rows are multiplied with several panels at once: enough sums to hide that an addition takes four
cycles, and a processor reads from several places faster than from one. These places are as far apart as they
can be, so that each is read on from panel to panel.

A sum adds up the steps in order, whatever the other rows are and however many: a row's bits do not depend on
its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import write_row
from outrider.engine.cpu.kernels.parts import OWN, job_of, operands_of
from outrider.engine.cpu.kernels.steps import (
    TOGETHER,
    add_products,
    factors,
    has_instruction,
    hidden,
    step_numbers,
)
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    I64,
    SUM,
    VECTOR_BYTES,
    WIDE,
    Address,
    Builder,
    Value,
    emits,
    fetch,
    known,
    pointer,
)
from outrider.engine.cpu.panels import PANEL, STRIDE
from outrider.engine.cpu.processor import LANES

LINE = 64
"""Bytes of a cache line."""
GROUP = 14 if WIDE else 6
"""Rows of a group. With AVX-512 their sums take 28 of 32 registers, with AVX2 12 of 16; the weights take two,
a row's number in all lanes one."""
AHEAD = 8192
"""How many bytes ahead weights are fetched. With AVX-512 BF16 on a Zen 5, for 14 rows and 432 MB of weights:
17.6, 15.0, 13.1 and 14.8 ms with 512, 2048, 8192 and 32768; on a Xeon with AMX 4096 to 16384 are equal."""
BLOCK = AHEAD // STRIDE
"""Steps of a block. While the groups take turns with one block, they fetch the next."""
MAX_ROWS = 10 * GROUP
"""Rows of one pass over the weights; their numbers for a block of steps stay in the cache."""
SUMS_BYTES = STRIDE * MAX_ROWS
"""Scratch memory for the sums of one panel of many rows, or of several panels of few."""


def rows_kind(kind: str) -> str:
    """The kind of numbers that rows are given in."""
    return kind if has_instruction(kind) else "float32"


def most_panels(rows: int) -> int:
    """How many panels are multiplied with some rows at once, at most.

    With AVX2 on one core of a Zen 3, 1, 2, 3 rows and 432 MB of weights take 0.79, 0.87 and 0.96 of the time
    that they take one panel at a time. With AVX-512 this was not measured.
    """
    return 1 if WIDE else max(1, GROUP // rows)


_most_panels = inlined(most_panels)


@emits(types.void, *[Address] * 10, types.boolean, literals=2)
def _add_block(
    builder: Builder, kind: str, locality: int, panels: Value, rows: Value, x: Value, x_stride: Value,
    w: Value, w_stride: Value, steps: Value, ahead: Value, stride: Value, sums: Value, first: Value,
) -> None:  # fmt: skip
    """Add `steps` steps of some panels, which are `w_stride` bytes apart, to the sums [panels, rows, PANEL]
    of up to GROUP rows; set them if `first`.

    With one panel, the two lines at `ahead` are fetched at each step, which then moves on by `stride` bytes.
    Several panels are fetched by the processor on its own: a Zen 3 is as fast or faster without being told.
    """
    with known(builder, rows, range(1, GROUP + 1)) as counts:
        for count in counts:
            with known(builder, panels, range(1, most_panels(count) + 1)) as widths:
                for width in widths:
                    block = _Block(kind, locality, width, count)
                    block.add_steps(builder, x, x_stride, w, w_stride, steps, ahead, stride, sums, first)


class _Block:
    """The loop of `_add_block` for a number of panels and rows."""

    def __init__(self, kind: str, locality: int, panels: int, rows: int) -> None:
        self.kind, self.locality, self.panels, self.rows = kind, locality, panels, rows
        self.cells = [
            (panel, half, row) for panel in range(panels) for half in range(2) for row in range(rows)
        ]
        self.given = rows_kind(kind)
        self.row_bytes = TOGETHER[kind] * BYTES[self.given]
        """Bytes of a row that a step takes."""

    def add_steps(
        self, builder: Builder, x: Value, x_stride: Value, w: Value, w_stride: Value, steps: Value,
        ahead: Value, stride: Value, sums: Value, first: Value,
    ) -> None:  # fmt: skip
        """Add all steps of a block."""
        places = {}
        for panel, half, row in self.cells:
            offset = STRIDE * (self.rows * panel + row) + VECTOR_BYTES * half
            places[panel, half, row] = pointer(builder, builder.add(sums, I64(offset)))
        totals = {cell: cgutils.alloca_once(builder, SUM) for cell in self.cells}
        for cell, place in places.items():
            before = builder.load(place, typ=SUM, align=VECTOR_BYTES)
            builder.store(builder.select(first, ir.Constant(SUM, None), before), totals[cell])
        with cgutils.for_range(builder, steps) as loop:
            step = builder.add(w, builder.mul(loop.index, I64(STRIDE)))
            if self.panels == 1:
                lines = builder.add(ahead, builder.mul(loop.index, stride))
                for line in range(0, STRIDE, LINE):
                    fetch(builder, self.locality, builder.add(lines, I64(line)))
            row = builder.add(x, builder.mul(loop.index, I64(self.row_bytes)))
            self._add_step(builder, step, w_stride, row, x_stride, totals)
        for cell, place in places.items():
            builder.store(builder.load(totals[cell], typ=SUM), place, align=VECTOR_BYTES)

    def _add_step(
        self, builder: Builder, w: Value, w_stride: Value, x: Value, x_stride: Value,
        totals: dict[tuple[int, int, int], Value],
    ) -> None:  # fmt: skip
        """Add a step of each panel to the sums of all rows."""
        for panel in range(self.panels):
            step = builder.add(w, builder.mul(w_stride, I64(panel)))
            if panel:
                x = hidden(builder, x)
            for weights, place in factors(builder, self.kind, step):
                for row in range(self.rows):
                    offset = builder.add(builder.mul(x_stride, I64(row)), I64(place))
                    number = step_numbers(builder, self.given, builder.add(x, offset))
                    for half, weight in enumerate(weights):
                        total = totals[panel, half, row]
                        before = builder.load(total, typ=SUM)
                        builder.store(add_products(builder, self.given, before, weight, number), total)


STEPS, SUMS, SUMS_APART = range(OWN, OWN + 3)
"""Places in a job: steps of a panel; scratch memory of the first member, and bytes to the next one's."""


@cache
def row_matmul(kind: str, locality: int) -> Callable[..., None]:
    """The kernel for a kind of numbers, whose weights are fetched with a locality; see `prefetch`. It
    computes a part (see `parts`) of Y [rows, columns] of X [rows, steps] of `rows_kind` and W.

    W is [panels, steps, STRIDE bytes]; the bias [panels, PANEL] float32. Scratch memory has SUMS_BYTES. A
    gated Y has half of the columns.
    """
    size, row_bytes = BYTES[kind], TOGETHER[kind] * BYTES[rows_kind(kind)]

    @kernel("void(intp, intp, intp)", for_kernels=True)
    def multiply(table: int, part: int, member: int) -> None:
        job = job_of(table, part)
        x, x_stride, rows, w, panels, bias, y, y_stride, columns, gated = operands_of(job, part)
        steps, sums = job[STEPS], job[SUMS] + member * job[SUMS_APART]
        groups = (rows + GROUP - 1) // GROUP
        width = LANES if gated else PANEL
        block = steps if groups == 1 else BLOCK
        share = STRIDE // groups
        first = 0
        while first < panels:
            at_once = min(panels - first, _most_panels(rows))
            turns = (panels - first) // at_once
            for panel in range(first, first + turns):
                for step in range(0, steps, block):
                    place = w + (panel * steps + step) * STRIDE
                    count = min(block, steps - step)
                    for group in range(groups):
                        low = group * rows // groups
                        size_here = (group + 1) * rows // groups - low
                        at, here = x + low * x_stride + row_bytes * step, sums + STRIDE * low
                        ahead = place + AHEAD + group * share * count
                        _add_block(
                            kind, locality, at_once, size_here, at, x_stride, place, turns * steps * STRIDE,
                            count, ahead, share, here, step == 0,
                        )  # fmt: skip
                for which in range(at_once):
                    column = panel + turns * which
                    b = bias + STRIDE * column if bias else 0
                    left = columns - width * column
                    for row in range(rows):
                        place = y + row * y_stride + size * width * column
                        write_row(kind, size, gated, sums + STRIDE * (rows * which + row), b, place, left)
            first += turns * at_once

    return multiply
