"""`Y = X W^T + b` with AVX-512 or AVX2, for few rows X and many weights W.

A step of the target reads every weight once and has little to compute with each; what takes time is the
memory. While a panel of weights is multiplied with up to GROUP rows, the memory ahead is already being
fetched, so that GROUP rows cost little more than one. More rows are several groups; each fetches its share.

    panel      PANEL columns of W^T, one after the other in memory, read once from front to back
    step       what one multiply-add takes: of a row 4 bytes, which are two bfloat16 numbers or one float32,
               and of every column of the panel as much
    group      up to GROUP rows, whose sums stay in registers
    block      BLOCK steps of a panel, which stay in the nearest cache while several groups take turns

A sum adds up the steps in order, whatever the other rows are and however many: a row's bits do not depend on
its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils

from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.epilogue import PANEL, write_row
from outrider.engine.cpu.kernels.steps import add_products, step_numbers, step_weights
from outrider.engine.cpu.kernels.vectors import (
    I64,
    SUM,
    VECTOR_BYTES,
    WIDE,
    Address,
    Builder,
    Value,
    emits,
    fetch,
    pointer,
    rows_known,
)
from outrider.engine.cpu.processor import LANES

STEP_BYTES = 4
"""Bytes of a row that one step takes."""
STRIDE = STEP_BYTES * PANEL
"""Bytes of a step of a panel, and of a row's sums."""
LINE = 64
"""Bytes of a cache line."""
GROUP = 14 if WIDE else 4
"""Rows of a group. With AVX-512 their sums take 28 of 32 registers, the weights two, a row's step in all
lanes one. AVX2 has 16: eight for sums, four for weights whose pairs are taken apart, the rest for a row's
step; with a fifth row some sums would be in memory."""
AHEAD = 8192
"""How many bytes ahead weights are fetched. With AVX-512 BF16 on a Zen 5, for 14 rows and 432 MB of weights:
17.6, 15.0, 13.1 and 14.8 ms with 512, 2048, 8192 and 32768; on a Xeon with AMX 4096 to 16384 are equal."""
BLOCK = AHEAD // STRIDE
"""Steps of a block. While the groups take turns with one block, they fetch the next."""
MAX_ROWS = 10 * GROUP
"""Rows of one pass over the weights; their numbers for a block of steps stay in the cache."""


@emits(types.void, *[Address] * 8, types.boolean, literals=2)
def _add_block(
    builder: Builder, kind: str, locality: int, rows: Value, x: Value, x_stride: Value, w: Value,
    steps: Value, ahead: Value, stride: Value, sums: Value, first: Value,
) -> None:  # fmt: skip
    """Add `steps` steps of a panel to the sums [rows, PANEL] of up to GROUP rows; set them if `first`.

    At each step the two lines at `ahead` are fetched, which then moves on by `stride` bytes.
    """
    with rows_known(builder, rows, GROUP) as counts:
        for count in counts:
            _add_rows(builder, kind, locality, count, x, x_stride, w, steps, ahead, stride, sums, first)


def _add_rows(
    builder: Builder, kind: str, locality: int, rows: int, x: Value, x_stride: Value, w: Value,
    steps: Value, ahead: Value, stride: Value, sums: Value, first: Value,
) -> None:  # fmt: skip
    """The loop of `_add_block` for a number of rows."""
    cells = [(row, half) for row in range(rows) for half in range(2)]
    places = [
        pointer(builder, builder.add(sums, I64(STRIDE * row + 4 * LANES * half))) for row, half in cells
    ]
    totals = [cgutils.alloca_once(builder, SUM) for _ in cells]
    for place, total in zip(places, totals, strict=True):
        before = builder.load(place, typ=SUM, align=VECTOR_BYTES)
        builder.store(builder.select(first, ir.Constant(SUM, None), before), total)
    with cgutils.for_range(builder, steps) as loop:
        panel = builder.add(w, builder.mul(loop.index, I64(STRIDE)))
        halves = [builder.add(panel, I64(4 * LANES * half)) for half in range(2)]
        weights = [step_weights(builder, kind, half) for half in halves]
        lines = builder.add(ahead, builder.mul(loop.index, stride))
        for line in range(0, STRIDE, LINE):
            fetch(builder, locality, builder.add(lines, I64(line)))
        step = builder.add(x, builder.mul(loop.index, I64(STEP_BYTES)))
        for row in range(rows):
            numbers = step_numbers(builder, kind, builder.add(step, builder.mul(x_stride, I64(row))))
            for half in range(2):
                total = totals[2 * row + half]
                sum_before = builder.load(total, typ=SUM)
                builder.store(add_products(builder, kind, sum_before, weights[half], numbers), total)
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(total, typ=SUM), place, align=VECTOR_BYTES)


@cache
def row_matmul(kind: str, locality: int) -> Callable[..., None]:
    """The kernel for a kind of numbers, whose weights are fetched with a locality; see `prefetch`."""
    size = 2 if kind == "bfloat16" else 4

    @kernel("void(intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, boolean, intp)")
    def multiply(
        x: int, x_stride: int, w: int, steps: int, panels: int, bias: int, y: int, y_stride: int,
        columns: int, rows: int, gated: bool, sums: int,
    ) -> None:  # fmt: skip
        """Compute Y [rows, columns] of X [rows, 4 steps bytes] and some panels of W.

        W is [panels, steps, STRIDE bytes]; `bias` [panels, PANEL] float32, or 0. Rows of X and Y are
        `x_stride` and `y_stride` bytes apart. `sums` is scratch memory [rows, PANEL] float32. With `gated` Y
        has half of the columns.
        """
        groups = (rows + GROUP - 1) // GROUP
        width = LANES if gated else PANEL
        block = steps if groups == 1 else BLOCK
        share = STRIDE // groups
        for panel in range(panels):
            for step in range(0, steps, block):
                place = w + (panel * steps + step) * STRIDE
                count = min(block, steps - step)
                for group in range(groups):
                    low = group * rows // groups
                    size_here = (group + 1) * rows // groups - low
                    at, here = x + low * x_stride + STEP_BYTES * step, sums + STRIDE * low
                    ahead = place + AHEAD + group * share * count
                    _add_block(
                        kind, locality, size_here, at, x_stride, place, count, ahead, share, here, step == 0
                    )
            b = bias + STRIDE * panel if bias else 0
            for row in range(rows):
                place = y + row * y_stride + size * width * panel
                write_row(kind, size, gated, sums + STRIDE * row, b, place, columns - width * panel)

    return multiply
