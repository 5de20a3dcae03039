"""Cuts jobs into the parts that threads share; for a product, some panels for some rows.

A table has a job, which is a line of int64 numbers, for each weight and each pass of rows over it. All jobs
of a table are cut into the same number of shares; part p is share p % shares of job p // shares.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.engine.cpu.kernels.compiling import Int64, inlined, kernel
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


@kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
def write_jobs(table: int, part: int, member: int) -> None:
    """Write the jobs of products whose weights have different rows, and the number of their parts.

    The table: the end [E] of each weight's rows, E; a job for one row of each weight, and how many numbers a
    job has; the own numbers of jobs with 1, 2, ... rows, and how many they are; panels of a weight; shares
    that all jobs together should have; most rows of a pass, and of one where there are too few panels; the
    rows, and bytes from row to row; the result, and bytes from row to row; the jobs; the number of parts.
    """
    call = integers(table)
    ends, weights, templates, length = integers(call[0]), call[1], call[2], call[3]
    owns, own_count, panels, all_shares = call[4], call[5], call[6], call[7]
    max_rows, shared_rows, x, x_stride = call[8], call[9], call[10], call[11]
    y, y_stride, jobs, parts = call[12], call[13], call[14], integers(call[15])
    used, first = 0, 0
    for weight in range(weights):
        used += ends[weight] > first
        first = ends[weight]
    wanted = (all_shares + used - 1) // max(used, 1)
    shares = min(wanted, panels)
    most = max_rows if shares == wanted else shared_rows
    count, first = 0, 0
    for weight in range(weights):
        rows = ends[weight] - first
        passes = (rows + most - 1) // most
        template = integers(templates + 8 * length * weight)
        for number in range(passes):
            low, high = rows * number // passes, rows * (number + 1) // passes
            job, own = integers(jobs + 8 * length * count), integers(owns + 8 * own_count * (high - low - 1))
            for place in range(OWN):
                job[place] = template[place]
            for place in range(own_count):
                job[OWN + place] = own[place]
            job[SHARES], job[ROWS] = shares, high - low
            job[X], job[X_STRIDE] = x + x_stride * (first + low), x_stride
            job[Y] = y + y_stride * (first + low)
            count += 1
        first = ends[weight]
    parts[0] = count * shares
