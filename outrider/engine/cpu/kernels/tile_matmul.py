"""`Y = X W^T + b` in bfloat16 on the processor's matrix tiles (Intel AMX).

    panel      32 columns of W^T, one after the other in memory
    tile       of X up to 16 rows of 32 numbers, of a panel 32 numbers of 16 columns, of sums 16 x 16
    group      up to 16 rows of X; all groups of a call are equally high, so that tiles are configured once,
               and the last one overlaps the one before
    pass       two groups with one panel: four tiles of sums
    block      tiles of a panel that stay in the cache while the passes take turns
    pair       two panels with a single group: a core reads two places faster than one
    chunk      panels that take turns with one block of X

The order of a sum is fixed: tile after tile, each as `multiply_tiles` says. So a row's bits do not depend
on its batch, and processors without AMX can compute the same ones.
"""

from __future__ import annotations

from outrider.engine.cpu.kernels import tiles
from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import write_row
from outrider.engine.cpu.kernels.parts import OWN, job_of, operands_of
from outrider.engine.cpu.kernels.vectors import prefetch
from outrider.engine.cpu.panels import PANEL, STRIDE
from outrider.engine.cpu.processor import LANES

NUMBERS = 32
"""Numbers of a row that one tile takes."""
TILE_STEPS = tiles.ROWS
TILE_BYTES = TILE_STEPS * STRIDE
"""Bytes of a panel's two tiles that lie side by side."""
TILE_LINES = TILE_BYTES // 64
PAIR_BYTES = tiles.ROWS * STRIDE
"""Bytes from the sums of the first panel of a pair to those of the second."""
BLOCK = 32
"""Tiles of a block: 64 KB of weights."""
AHEAD = 2048
"""How many bytes ahead weights are fetched of each panel of a pair. Pairs take 0.84 to 0.98 of the time of
blocks on a Xeon with AMX."""
CHUNK = 16
"""Panels of a chunk. Their results are written row by row, so that a row's columns are written one after the
other."""
MAX_ROWS = 256
"""Rows of one pass over the weights; a chunk's sums are 0.5 MB then."""


@inlined
def add_block(
    x0: int, x1: int, two: bool, stride: int, w: int, count: int, ahead: int, lines: int, s0: int, s1: int,
    first: bool,
) -> None:  # fmt: skip
    """Add `count` tiles of a panel to the sums of one group or two; sums begin with the `first` block.

    For each tile, `lines` cache lines of what comes next, from `ahead` on, are fetched.
    """
    if first:
        tiles.zero(0)
        tiles.zero(1)
        if two:
            tiles.zero(2)
            tiles.zero(3)
    else:
        tiles.load_tile(0, s0, STRIDE)
        tiles.load_tile(1, s0 + 64, STRIDE)
        if two:
            tiles.load_tile(2, s1, STRIDE)
            tiles.load_tile(3, s1 + 64, STRIDE)
    for k in range(count):
        for line in range(lines):
            prefetch(2, ahead + 64 * (k * lines + line))
        tiles.load_tile(4, x0 + 64 * k, stride)
        tiles.load_tile(6, w + TILE_BYTES * k, STRIDE)
        tiles.multiply_tiles(0, 4, 6)
        tiles.load_tile(7, w + TILE_BYTES * k + 64, STRIDE)
        tiles.multiply_tiles(1, 4, 7)
        if two:
            tiles.load_tile(5, x1 + 64 * k, stride)
            tiles.multiply_tiles(2, 5, 6)
            tiles.multiply_tiles(3, 5, 7)
    tiles.store_tile(0, s0, STRIDE)
    tiles.store_tile(1, s0 + 64, STRIDE)
    if two:
        tiles.store_tile(2, s1, STRIDE)
        tiles.store_tile(3, s1 + 64, STRIDE)


@inlined
def _multiply_block(
    x: int, stride: int, w: int, count: int, following: int, rows: int, height: int, sums: int, first: bool
) -> None:
    """Compute all passes of one block. Each fetches a part of the next block, which `following` points to."""
    groups = (rows + height - 1) // height
    passes = (groups + 1) // 2
    lines = (TILE_LINES + passes - 1) // passes
    for turn in range(passes):
        row0 = min(2 * turn * height, rows - height)
        row1 = min((2 * turn + 1) * height, rows - height)
        s0 = sums + 2 * turn * height * STRIDE
        s1 = s0 + height * STRIDE
        ahead = following + turn * lines * count * 64
        two = 2 * turn + 1 < groups
        add_block(x + row0 * stride, x + row1 * stride, two, stride, w, count, ahead, lines, s0, s1, first)


@inlined
def _multiply_pair(
    x: int, stride: int, rest: int, w0: int, w1: int, whole: int, count: int, sums: int
) -> None:
    """Multiply a group with `count` tiles of two panels, of which all but `whole` read the `rest` of rows."""
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for k in range(count):
        at0, at1 = w0 + TILE_BYTES * k, w1 + TILE_BYTES * k
        for line in range(TILE_LINES):
            prefetch(3, at0 + AHEAD + 64 * line)
            prefetch(3, at1 + AHEAD + 64 * line)
        if k < whole:
            tiles.load_tile(4, x + 64 * k, stride)
        else:
            tiles.load_tile(4, rest, 64)
        tiles.load_tile(6, at0, STRIDE)
        tiles.multiply_tiles(0, 4, 6)
        tiles.load_tile(7, at0 + 64, STRIDE)
        tiles.multiply_tiles(1, 4, 7)
        tiles.load_tile(6, at1, STRIDE)
        tiles.multiply_tiles(2, 4, 6)
        tiles.load_tile(7, at1 + 64, STRIDE)
        tiles.multiply_tiles(3, 4, 7)
    tiles.store_tile(0, sums, STRIDE)
    tiles.store_tile(1, sums + 64, STRIDE)
    tiles.store_tile(2, sums + PAIR_BYTES, STRIDE)
    tiles.store_tile(3, sums + PAIR_BYTES + 64, STRIDE)


@inlined
def write_chunk(
    first: int, end: int, bias: int, y: int, y_stride: int, columns: int, rows: int, height: int,
    gated: bool, sums: int,
) -> None:  # fmt: skip
    """Write the results of panels [first, end), row by row."""
    groups = (rows + height - 1) // height
    width = LANES if gated else PANEL
    for group in range(groups):
        row = min(group * height, rows - height)
        for r in range(height):
            for panel in range(first, end):
                s = sums + ((panel - first) * groups * height + group * height + r) * STRIDE
                b = bias + STRIDE * panel if bias else 0
                at = y + (row + r) * y_stride + 2 * panel * width
                write_row("bfloat16", 2, gated, s, b, at, columns - panel * width)


TOTAL, HEIGHT, CONFIGURATION, RESTS, RESTS_APART, SUMS, SUMS_APART = range(OWN, OWN + 7)
"""Places in a job: numbers of a row, height of a group, its configuration; scratch memory of the first
member, and bytes to the next one's."""


@kernel("void(intp, intp, intp)", for_kernels=True)
def tile_matmul(table: int, part: int, member: int) -> None:
    """Compute a part (see `parts`) of Y [rows, columns] of X [rows, numbers] and W.

    W is [panels, tiles, 16, 32, 2], with zeros after `numbers`; the bias [panels, 32] float32. A group has
    `height` rows, at most 16, and the configuration is for that height. Scratch memory: `rest` [rows, 32]
    bfloat16, `sums` [CHUNK, rows + 15, 32] float32. A gated Y has half of the columns.
    """
    job = job_of(table, part)
    x, x_stride, rows, w, panels, bias, y, y_stride, columns, gated = operands_of(job, part)
    numbers, height, configuration = job[TOTAL], job[HEIGHT], job[CONFIGURATION]
    rest, sums = job[RESTS] + member * job[RESTS_APART], job[SUMS] + member * job[SUMS_APART]
    tiles.configure(configuration)
    whole, left = numbers // NUMBERS, numbers % NUMBERS
    count_all = whole + (1 if left else 0)
    if left:
        for row in range(rows):
            tiles.copy_start(rest + 64 * row, x + row * x_stride + 64 * whole, left)
    panel_bytes = count_all * TILE_BYTES
    groups = (rows + height - 1) // height
    panel_sums = groups * height * STRIDE
    pairs = panels // 2 if groups == 1 else 0
    for panel in range(pairs):
        w0, w1 = w + panel * panel_bytes, w + (pairs + panel) * panel_bytes
        _multiply_pair(x, x_stride, rest, w0, w1, whole, count_all, sums)
        for which in range(2):
            done, at = panel + pairs * which, sums + PAIR_BYTES * which
            write_chunk(done, done + 1, bias, y, y_stride, columns, rows, height, gated, at)
    for first in range(2 * pairs, panels, CHUNK):
        end = min(first + CHUNK, panels)
        tile = 0
        while tile < count_all:
            # The rest is a block of its own, because it lies elsewhere.
            in_rest = tile == whole
            count = 1 if in_rest else min(BLOCK, whole - tile)
            block_x = rest if in_rest else x + 64 * tile
            stride = 64 if in_rest else x_stride
            for panel in range(first, end):
                block_w = w + panel * panel_bytes + tile * TILE_BYTES
                following = block_w + panel_bytes
                if panel == end - 1:
                    following = w + first * panel_bytes + (tile + count) * TILE_BYTES
                    if tile + count == count_all:
                        following = w + end * panel_bytes
                at = sums + (panel - first) * panel_sums
                _multiply_block(block_x, stride, block_w, count, following, rows, height, at, tile == 0)
            tile += count
        write_chunk(first, end, bias, y, y_stride, columns, rows, height, gated, sums)
    tiles.release()
