"""Cuts jobs into the parts that threads share; for a product, some panels for some rows.

A table has a job, which is a line of int64 numbers, for each weight and each pass of rows over it. All jobs
of a table are cut into the same number of shares; part p is share p % shares of job p // shares.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.engine.cpu.kernels.compiling import Int64, inlined
from outrider.engine.cpu.kernels.vectors import integers

(
    LENGTH,
    SHARES,
    PANELS,
    X,
    X_STRIDE,
    ROWS,
    W,
    PANEL_BYTES,
    BIAS,
    BIAS_BYTES,
    Y,
    Y_STRIDE,
    COLUMNS,
    PANEL_COLUMNS,
    PANEL_Y_BYTES,
    GATED,
    OWN,
) = range(17)
"""Places of the numbers in a product's job; the first two are those of any job. LENGTH: how many numbers it
has. X, W, BIAS, Y: addresses; BIAS is 0 where there is none. ..._STRIDE: bytes from row to row. PANEL_...: of
one panel. OWN: the first of those that only one kernel has."""


@inlined
def job_of(table: int, part: int) -> Int64:
    """The numbers of a part's job."""
    first = integers(table)
    return integers(table + 8 * first[LENGTH] * (part // first[SHARES]))


@inlined
def share_of(job: Int64, part: int, count: int) -> tuple[int, int]:
    """[first, end): the share of `count` things that a part has."""
    shares = job[SHARES]
    share = part % shares
    return count * share // shares, count * (share + 1) // shares


class Operands(NamedTuple):
    """What a part of a product multiplies: addresses, bytes between rows, and how many rows, panels and
    columns there are."""

    x: int
    x_stride: int
    rows: int
    w: int
    panels: int
    bias: int
    y: int
    y_stride: int
    columns: int
    gated: bool


@inlined
def operands_of(job: Int64, part: int) -> Operands:
    """What a part multiplies: some panels, with all rows of its job."""
    first, end = share_of(job, part, job[PANELS])
    return Operands(
        job[X],
        job[X_STRIDE],
        job[ROWS],
        job[W] + first * job[PANEL_BYTES],
        end - first,
        job[BIAS] + first * job[BIAS_BYTES],
        job[Y] + first * job[PANEL_Y_BYTES],
        job[Y_STRIDE],
        job[COLUMNS] - first * job[PANEL_COLUMNS],
        job[GATED] != 0,
    )
