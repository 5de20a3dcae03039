"""`Y = X W^T + b` in bfloat16 on the processor's matrix tiles (Intel AMX), for weights W of 4 or 8 bits.

    group      numbers of a row of W that share a scale, and perhaps a zero
    panel      32 columns of W^T
    tile       of X up to 16 rows of 32 numbers; all tiles of a call are equally high, so that they are
               configured once, and the last one overlaps the one before
    pass       two tiles of X with one group of a panel: four tiles of sums
    place      where one of several panels lies that take turns; a core reads several places faster than one

The codes of a group become bfloat16 numbers in scratch memory, which the nearest cache holds while the passes
take turns. The next group's are unpacked while tiles multiply this group's. A row alone is multiplied from
registers (`quantized_row`).

The zero of a group is not subtracted from each code. Instead, the zero times the sum of a row's numbers in
the group is subtracted from the group's sum.

A sum adds up a group tile after tile, as `multiply_tiles` says, then the groups, whatever the other rows are
and however many: a row's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from numba import types
from numba.core import cgutils

from outrider.engine.cpu.kernels import tiles
from outrider.engine.cpu.kernels.codes import Codes
from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.parts import OWN, Operands, job_of, operands_of
from outrider.engine.cpu.kernels.quantized_row import add_row, head_bytes
from outrider.engine.cpu.kernels.row_matmul import LINE
from outrider.engine.cpu.kernels.tile_matmul import AHEAD, NUMBERS, TILE_BYTES, add_block, write_chunk
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    I64,
    VECTOR_BYTES,
    WORDS,
    Address,
    Builder,
    Value,
    emits,
    fetch,
    first_lanes,
    floats,
    load,
    load_aligned,
    multiply_add,
    pointer,
    splat,
    store_aligned,
)
from outrider.engine.cpu.panels import PANEL, STRIDE
from outrider.engine.cpu.processor import LANES

MAX_ROWS = 64
"""Rows of one pass over the weights. On a Xeon with AMX 256 rows of 8192 numbers take 1.4 and 1.6 times as
long with 128 and 256: the cache does not hold so many rows while panels take turns."""
PLACES = 4
"""Panels that take turns with up to one tile of rows, whose sums stay in the nearest cache. On a Xeon with
AMX eight rows take 0.8 to 0.83 of the time from four places, and 32 rows 1.0 to 1.07."""
PASS_BYTES, SUMS_BYTES = 2 * tiles.ROWS * STRIDE, (MAX_ROWS + tiles.ROWS) * STRIDE
"""Bytes of a pass's sums of a group, and of the sums of panels that take turns."""


def scratch_bytes(group: int) -> int:
    """Scratch memory for groups of `group` numbers: for sums, and the bfloat16 numbers of two groups."""
    return PASS_BYTES + SUMS_BYTES + 2 * group // NUMBERS * TILE_BYTES


@emits(types.void, Address, Address, Address, literals=4)
def _unpack(
    builder: Builder, code: str, scales: str, zeros: int, locality: int, group: Value, words: Value,
    made: Value,
) -> None:  # fmt: skip
    """Turn a group's words, which follow its scales and zeros, into the rows of a panel's tiles. Fetch as
    many bytes from AHEAD on."""
    codes = Codes(code, bool(zeros), "bfloat16")
    steps, per_word, head = codes.steps(builder), 16 // codes.bits, head_bytes(scales, zeros)
    for at in range(0, head, LINE):
        fetch(builder, locality, builder.add(group, I64(AHEAD + at)))
    first = builder.add(group, I64(head))
    with cgutils.for_range(builder, words) as loop:
        line = builder.add(first, builder.mul(loop.index, I64(STRIDE)))
        rows = builder.add(made, builder.mul(loop.index, I64(STRIDE * per_word)))
        for half in (0, VECTOR_BYTES):
            fetch(builder, locality, builder.add(line, I64(AHEAD + half)))
            place = pointer(builder, builder.add(line, I64(half)))
            word = builder.load(place, typ=WORDS, align=VECTOR_BYTES)
            for row, step in enumerate(steps(builder, word)):
                target = builder.add(rows, I64(STRIDE * row + half))
                builder.store(step, pointer(builder, target), align=VECTOR_BYTES)


@inlined
def _add_scaled(
    scales: str, half: int, zeros: int, middle: float, head: int, shares: int, x_stride: int, rows: int,
    sums: int, totals: int,
) -> None:  # fmt: skip
    """Add the sums of a group, times their scales, to those of the panel. Scales and zeros of half a panel
    take `half` bytes; shares are `x_stride` bytes apart."""
    whole = first_lanes(LANES)
    low_scale, high_scale = load(scales, head, whole), load(scales, head + half, whole)
    if zeros:
        low_zero = load(scales, head + 2 * half, whole) - splat(middle)
        high_zero = load(scales, head + 3 * half, whole) - splat(middle)
    for row in range(rows):
        at, total = sums + STRIDE * row, totals + STRIDE * row
        low, high = load_aligned(at), load_aligned(at + VECTOR_BYTES)
        if zeros:
            share = splat(floats(shares + x_stride * row)[0])
            low, high = multiply_add(low_zero, share, low), multiply_add(high_zero, share, high)
        store_aligned(total, multiply_add(low_scale, low, load_aligned(total)))
        total += VECTOR_BYTES
        store_aligned(total, multiply_add(high_scale, high, load_aligned(total)))


@inlined
def _clear(sums: int, size: int) -> None:
    """Set sums to 0."""
    for at in range(0, size, VECTOR_BYTES):
        store_aligned(sums + at, splat(0.0))


@inlined
def _write_panel(of: Operands, panel: int, totals: int, height: int) -> None:
    """Write the results of a panel."""
    write_chunk(panel, panel + 1, of.bias, of.y, of.y_stride, of.columns, of.rows, height, of.gated, totals)


class Groups(NamedTuple):
    """How a weight's groups lie: how many of each panel, how many tiles wide, the words of a column, bytes
    from one to the next; and how many panels take turns, bytes from one to the next, and how often they
    do."""

    per_panel: int
    tiles: int
    words: int
    stride: int
    places: int
    apart: int
    turns: int


@inlined
def _panels_from(of: Operands, first: int, panel_bytes: int) -> Operands:
    """What is multiplied with the panels from `first` on."""
    width = LANES if of.gated else PANEL
    return Operands(
        of.x,
        of.x_stride,
        of.rows,
        of.w + first * panel_bytes,
        of.panels - first,
        of.bias + STRIDE * first if of.bias else 0,
        of.y + 2 * width * first,
        of.y_stride,
        of.columns - width * first,
        of.gated,
    )


@inlined
def _multiply_row(
    code: str, scales: str, zeros: int, locality: int, of: Operands, groups: Groups, totals: int
) -> None:
    """Multiply one row with panels that take turns."""
    shares, apart = of.x + 64 * groups.tiles * groups.per_panel, groups.apart
    for turn in range(groups.turns):
        _clear(totals, STRIDE * groups.places)
        for group in range(groups.per_panel):
            x, share = of.x + 64 * groups.tiles * group, shares + 4 * group
            w = of.w + (turn * groups.per_panel + group) * groups.stride
            if groups.places == PLACES:
                add_row(code, scales, zeros, locality, PLACES, x, share, w, apart, groups.words, totals)
            else:
                add_row(code, scales, zeros, locality, 1, x, share, w, apart, groups.words, totals)
        for place in range(groups.places):
            _write_panel(of, turn + groups.turns * place, totals + STRIDE * place, 1)


@inlined
def _multiply_group(
    code: str, scales: str, zeros: int, locality: int, half: int, middle: float, of: Operands, groups: Groups,
    height: int, group: int, here: int, following: int, made: int, other: int, sums: int, totals: int,
) -> None:  # fmt: skip
    """Multiply all tiles of rows with a group of a panel, which is `made` already. Meanwhile make what
    `following` points to, if anything, into `other`."""
    x = of.x + 64 * groups.tiles * group
    share, next_sums = of.x + 64 * groups.tiles * groups.per_panel + 4 * group, sums + STRIDE * height
    row_tiles = (of.rows + height - 1) // height
    for tile in range(0, row_tiles, 2):
        two = tile + 1 < row_tiles
        row0, row1 = min(tile * height, of.rows - height), min((tile + 1) * height, of.rows - height)
        x0, x1 = x + row0 * of.x_stride, x + row1 * of.x_stride
        add_block(x0, x1, two, of.x_stride, made, groups.tiles, 0, 0, sums, next_sums, True)
        if tile == 0 and following:
            _unpack(code, scales, zeros, locality, following, groups.words, other)
        own, total = share + row0 * of.x_stride, totals + STRIDE * height * tile
        _add_scaled(scales, half, zeros, middle, here, own, of.x_stride, height, sums, total)
        if two:
            own, total = share + row1 * of.x_stride, total + STRIDE * height
            _add_scaled(scales, half, zeros, middle, here, own, of.x_stride, height, next_sums, total)


@inlined
def _multiply_rows(
    code: str, scales: str, zeros: int, locality: int, half: int, middle: float, of: Operands, groups: Groups,
    height: int, sums: int, totals: int, made: int,
) -> None:  # fmt: skip
    """Multiply tiles of rows with panels that take turns."""
    size, made_bytes = STRIDE * height * ((of.rows + height - 1) // height), groups.tiles * TILE_BYTES
    done, end = 0, groups.turns * groups.per_panel * groups.places
    if end:
        _unpack(code, scales, zeros, locality, of.w, groups.words, made)
    for turn in range(groups.turns):
        _clear(totals, size * groups.places)
        for group in range(groups.per_panel):
            for place in range(groups.places):
                here = of.w + (turn * groups.per_panel + group) * groups.stride + place * groups.apart
                following = here + groups.apart
                if place + 1 == groups.places:
                    following = here + groups.stride - place * groups.apart
                if done + 1 == end:
                    following = 0
                this, other = made + done % 2 * made_bytes, made + (done + 1) % 2 * made_bytes
                _multiply_group(
                    code, scales, zeros, locality, half, middle, of, groups, height, group, here, following,
                    this, other, sums, totals + size * place,
                )  # fmt: skip
                done += 1
        for place in range(groups.places):
            _write_panel(of, turn + groups.turns * place, totals + size * place, height)


GROUPS, GROUP_WORDS, HEIGHT, CONFIGURATION, SCRATCH, SCRATCH_APART = range(OWN, OWN + 6)
"""Places in a job: groups of a row, words of a group, height of a tile of rows, its configuration; scratch
memory of the first member, and bytes to the next one's."""


@cache
def quantized_tile_matmul(code: str, scales: str, zeros: int, locality: int) -> Callable[..., None]:
    """The kernel for weights of a `code` (see `codes`) with scales, and perhaps zeros, of a kind. It computes
    a part (see `parts`) of Y [rows, columns] of prepared rows X and W.

    Each panel of W holds for each group [PANEL] scales, then as many zeros if there are any, and then [words,
    PANEL] words. The bias is [panels, PANEL] float32. A tile has `height` rows, at most 16, and the
    configuration is for that height. See `scratch_bytes` for scratch memory. A gated Y has half of the
    columns.
    """
    codes = Codes(code, bool(zeros), "bfloat16")
    half, per_word, middle = LANES * BYTES[scales], 32 // codes.bits, codes.middle
    head = head_bytes(scales, zeros)

    @kernel("void(intp, intp, intp)", for_kernels=True)
    def multiply(table: int, part: int, member: int) -> None:
        job = job_of(table, part)
        of = operands_of(job, part)
        count, words, height = job[GROUPS], job[GROUP_WORDS], job[HEIGHT]
        sums = job[SCRATCH] + member * job[SCRATCH_APART]
        totals = sums + PASS_BYTES
        made = totals + SUMS_BYTES
        mode = tiles.flush_denormals()
        tiles.configure(job[CONFIGURATION])
        together = PLACES if of.rows <= tiles.ROWS else 1
        whole = of.panels - of.panels % together
        for places, first, end in ((together, 0, whole), (1, whole, of.panels)):
            turns, stride = (end - first) // places, head + STRIDE * words
            wide, apart = words * per_word // NUMBERS, turns * count * stride
            groups = Groups(count, wide, words, stride, places, apart, turns)
            some = _panels_from(of, first, count * stride)
            if of.rows == 1:
                _multiply_row(code, scales, zeros, locality, some, groups, totals)
            else:
                _multiply_rows(
                    code, scales, zeros, locality, half, middle, some, groups, height, sums, totals, made
                )
        tiles.release()
        tiles.set_mode(mode)

    return multiply
