"""`Y = X W^T + b` with AVX-512 or AVX2, for few rows X and many weights W of 4 or 8 bits.

With one row memory takes the time, with many rows the multiplications. Codes become numbers in registers,
with few instructions that serve up to GROUP rows; see `codes`, also for words.

    group      numbers of a row of W that share a scale, and perhaps a zero
    panel      PANEL columns of W^T
    strip      STRIP panels, interleaved word by word, so that few rows, which are multiplied with all panels
               at once, read a strip from front to back
    block      groups of a strip, which stay in the cache while panels and rows take turns

The zero of a group is not subtracted from each code. Instead, the zero times the sum of a row's numbers in
the group is subtracted from the group's sum.

Where no instruction multiplies pairs of bfloat16 numbers, rows of 16-bit numbers are multiplied as whole
numbers, two at a time: a power of two divides each group of a row, so that its largest number is from 2^14 to
2^15. All bfloat16 numbers down to 1/128 of the largest then are whole; smaller ones are rounded, by at most
2^-15 of it. No sum of a group is rounded.

A sum adds up the numbers of a group in order, then the groups, whatever the other rows are and however many:
a row's bits do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils

from outrider.engine.cpu.kernels.codes import Codes, Steps
from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.epilogue import write_row
from outrider.engine.cpu.kernels.parts import OWN, job_of, operands_of
from outrider.engine.cpu.kernels.row_matmul import AHEAD, LINE
from outrider.engine.cpu.kernels.steps import add_products, step_numbers
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    F32,
    I32,
    I64,
    SUM,
    VECTOR_BYTES,
    WIDE,
    WORDS,
    Address,
    Builder,
    Value,
    emits,
    fetch,
    fused,
    known,
    numbers_at,
    pointer,
    splat,
    spread,
    store_aligned,
)
from outrider.engine.cpu.panels import PANEL, STRIDE
from outrider.engine.cpu.processor import LANES

STRIP = 4
"""Panels of a strip."""
GROUP = 12 if WIDE else 5
"""Rows whose sums for one panel stay in registers: 24 of 32, or 10 of 16; weights take four."""
AT_ONCE = {STRIP: 1, 2: 2, 1: GROUP}
"""Panels that are multiplied at once, and the most rows for which they are: enough sums to hide that an
addition takes four cycles, and no more than there are registers."""
BLOCK, SHORT = 512, 64
"""Numbers of a row in a block. SHORT is for few rows, whose time is memory's: panels that take turns then ask
for lines nearly in order. With short blocks 128 rows of 46,336 numbers take 1.3 times as long: each row has
its own pages."""
SHORT_ROWS = 4 * GROUP
"""Most rows of a pass with SHORT blocks."""
MAX_ROWS = 10 * GROUP
"""Rows of one pass over the weights."""
SUMS_BYTES = STRIP * MAX_ROWS * STRIDE
MAX_HEAD = 256
"""Most bytes of scales and zeros that stand before each group's words. A Zen 4 reads words at half the speed
with 512 bytes between them, and takes 1.15 times as long for one row where 256 bytes stand apart."""


def stand_apart(head: int) -> bool:
    """True where a strip's scales and zeros, `head` bytes per group, are stored before all words instead of
    before each group's words."""
    return head > MAX_HEAD


@emits(types.void, *[Address] * 10, literals=5)
def _add_strip(
    builder: Builder, code: str, numbers: str, kind: str, zeros: int, locality: int, rows: Value, x: Value,
    x_stride: Value, shares: Value, scales: Value, w: Value, panels: Value, groups: Value, words: Value,
    sums: Value,
) -> None:  # fmt: skip
    """Add groups of `words` words of a strip's panels to the sums of up to GROUP rows.

    It takes as many panels at once as their sums fit into registers, and fewer for the last ones.
    """
    codes = Codes(code, bool(zeros), numbers)
    first: Value = I64(0)
    for width, most in AT_ONCE.items():
        left = builder.udiv(builder.sub(panels, first), I64(width))
        turns = builder.select(builder.icmp_signed("<=", rows, I64(most)), left, I64(0))
        with cgutils.for_range(builder, turns) as loop:
            panel = builder.add(first, builder.mul(loop.index, I64(width)))
            totals = builder.add(sums, builder.mul(panel, I64(STRIDE * MAX_ROWS)))
            with known(builder, rows, range(1, most + 1)) as choices:
                for count in choices:
                    loop_of = _Groups(codes, kind, locality, width, count)
                    loop_of.add_groups(builder, x, x_stride, shares, scales, w, panel, groups, words, totals)
        first = builder.add(first, builder.mul(turns, I64(width)))


class _Groups:
    """The loop of `_add_strip` over groups, for a number of panels and rows."""

    def __init__(self, codes: Codes, kind: str, locality: int, panels: int, rows: int) -> None:
        self.codes, self.kind, self.locality, self.panels = codes, kind, locality, panels
        self.whole = codes.numbers == "int16"
        self.rows = range(rows)
        self.cells = [(panel, half) for panel in range(panels) for half in range(2)]
        self.half = LANES * BYTES[kind]
        self.heads = 2 * STRIP * self.half
        """Bytes of the scales of a group, or of its zeros."""

    def add_groups(
        self, builder: Builder, x: Value, x_stride: Value, shares: Value, scales: Value, w: Value,
        first: Value, groups: Value, words: Value, sums: Value,
    ) -> None:  # fmt: skip
        """Add all groups of a block."""
        kept = WORDS if self.whole else SUM
        totals = {cell: [cgutils.alloca_once(builder, kept) for _ in self.rows] for cell in self.cells}
        steps = self.codes.steps(builder)
        head = self.heads * (2 if self.codes.zeros else 1)
        apart, whole = stand_apart(head), self.panels == STRIP
        between = 0 if apart else head
        w_group = builder.add(I64(between), builder.mul(words, I64(STRIP * STRIDE)))
        head_group = I64(head) if apart else w_group
        x_group = builder.mul(words, I64(self.codes.row_bytes))
        # Panels that take turns fetch the next block in the order of memory, each a share of every group. All
        # panels at once do so anyway, and have no register for another address.
        share_bytes = builder.udiv(w_group, I64(STRIP))
        begin = builder.add(w, builder.mul(builder.mul(first, groups), share_bytes))
        begin = builder.add(begin, I64(AHEAD - between))
        fetched = builder.mul(share_bytes, I64(self.panels))
        with cgutils.for_range(builder, groups) as loop:
            here = builder.add(scales, builder.mul(loop.index, head_group))
            here = builder.add(here, builder.mul(first, I64(2 * self.half)))
            codes = builder.add(w, builder.mul(loop.index, w_group))
            codes = builder.add(codes, builder.mul(first, I64(STRIDE)))
            share = builder.add(shares, builder.mul(loop.index, I64(self.codes.share_bytes)))
            ahead = builder.add(begin, builder.mul(loop.index, fetched))
            heads_ahead = builder.add(here, I64(AHEAD)) if apart or whole else ahead
            ahead = builder.add(ahead, I64(between // STRIP * self.panels))
            self._begin(builder, totals, here, heads_ahead, share, x_stride)
            row = builder.add(x, builder.mul(loop.index, x_group))
            with cgutils.for_range(builder, words) as inner:
                line = builder.add(codes, builder.mul(inner.index, I64(STRIP * STRIDE)))
                step = builder.add(row, builder.mul(inner.index, I64(self.codes.row_bytes)))
                lines = builder.add(ahead, builder.mul(inner.index, I64(STRIDE * self.panels)))
                lines = builder.add(line, I64(AHEAD)) if whole else lines
                self._add_word(builder, steps, totals, line, lines, step, x_stride)
            self._end(builder, totals, here, share, x_stride, sums)

    def _begin(
        self,
        builder: Builder,
        totals: dict[tuple[int, int], list[Value]],
        scales: Value,
        ahead: Value,
        share: Value,
        x_stride: Value,
    ) -> None:
        """Set a group's sums to what its zeros subtract. Fetch as many bytes as its scales and zeros, from
        `ahead` on."""
        for at in range(0, self.half * len(self.cells) * (2 if self.codes.zeros else 1), LINE):
            fetch(builder, self.locality, builder.add(ahead, I64(at)))
        for row in self.rows:
            place = builder.add(share, builder.mul(x_stride, I64(row)))
            for cell in self.cells:
                begin = (
                    self._middles(builder, place) if self.whole else self._taken(builder, scales, place, cell)
                )
                builder.store(begin, totals[cell][row])

    def _middles(self, builder: Builder, share: Value) -> Value:
        """A row's share times the codes' middle."""
        share = builder.load(pointer(builder, share), typ=I32, align=4)
        return builder.shl(spread(builder, share), ir.Constant(WORDS, [self.codes.bits - 1] * LANES))

    def _taken(self, builder: Builder, scales: Value, share: Value, cell: tuple[int, int]) -> Value:
        """The zeros of half a panel minus the codes' middle, times a row's share."""
        middle, zero = ir.Constant(SUM, [self.codes.middle] * LANES), self.codes.zero
        if not self.codes.zeros and self.codes.middle == zero:
            return ir.Constant(SUM, None)
        zeros = ir.Constant(SUM, [zero] * LANES)
        if self.codes.zeros:
            zeros = self._head(builder, builder.add(scales, I64(self.heads)), cell)
        alone = builder.fsub(zeros, middle)
        share = builder.load(pointer(builder, share), typ=I32 if self.whole else F32, align=4)
        if self.whole:
            share = builder.sitofp(share, F32)
        return builder.fmul(alone, spread(builder, share))

    def _add_word(
        self, builder: Builder, steps: Steps, totals: dict[tuple[int, int], list[Value]], line: Value,
        ahead: Value, step: Value, x_stride: Value,
    ) -> None:  # fmt: skip
        """Add the products of a word of each column. Fetch as many bytes as these words, from `ahead` on."""
        for at in range(0, STRIDE * self.panels, LINE):
            fetch(builder, self.locality, builder.add(ahead, I64(at)))
        for panel in range(self.panels):
            halves = [STRIDE * panel + VECTOR_BYTES * half for half in range(2)]
            places = [pointer(builder, builder.add(line, I64(half))) for half in halves]
            words = [builder.load(place, typ=WORDS, align=VECTOR_BYTES) for place in places]
            for place, both in enumerate(zip(*(steps(builder, word) for word in words), strict=True)):
                for row in self.rows:
                    at = builder.add(builder.mul(x_stride, I64(row)), I64(4 * place))
                    number = step_numbers(builder, self.codes.numbers, builder.add(step, at))
                    for total, weight in zip(
                        (totals[panel, 0][row], totals[panel, 1][row]), both, strict=True
                    ):
                        before = builder.load(total)
                        made = add_products(builder, self.codes.numbers, before, weight, number)
                        builder.store(made, total)

    def _end(
        self, builder: Builder, totals: dict[tuple[int, int], list[Value]], scales: Value, share: Value,
        x_stride: Value, sums: Value,
    ) -> None:  # fmt: skip
        """Add the group's sums, times their scales, to those of the block."""
        for cell in self.cells:
            panel, half = cell
            scale = self._head(builder, scales, cell)
            for row in self.rows:
                at = STRIDE * (MAX_ROWS * panel + row) + VECTOR_BYTES * half
                place = pointer(builder, builder.add(sums, I64(at)))
                before = builder.load(place, typ=SUM, align=VECTOR_BYTES)
                total, factor = builder.load(totals[cell][row]), scale
                if self.whole:
                    own = builder.add(share, builder.mul(x_stride, I64(row)))
                    total = builder.sitofp(total, SUM)
                    if self.codes.zeros:
                        total = builder.fadd(total, self._taken(builder, scales, own, cell))
                    size = builder.load(pointer(builder, builder.add(own, I64(4))), typ=F32, align=4)
                    factor = builder.fmul(scale, spread(builder, size))
                builder.store(fused(builder, factor, total, before), place, align=VECTOR_BYTES)

    def _head(self, builder: Builder, first: Value, cell: tuple[int, int]) -> Value:
        """The scales, or zeros, of half a panel; `first` is the address of the first panel's."""
        panel, half = cell
        return numbers_at(builder, self.kind, builder.add(first, I64(self.half * (2 * panel + half))))


GROUPS, GROUP_WORDS, SUMS, SUMS_APART = range(OWN, OWN + 4)
"""Places in a job: groups of a row, words of a group; scratch memory of the first member, and bytes to the
next one's."""


@cache
def quantized_matmul(
    kind: str, code: str, numbers: str, scales: str, zeros: int, locality: int
) -> Callable[..., None]:
    """The kernel for results of a kind, and weights of a `code`, multiplied as `numbers` (see `codes`), with
    scales, and perhaps zeros, of another kind. It computes a part (see `parts`, where a panel is a strip
    here) of Y [rows, columns] of prepared rows X and W.

    Each strip of W holds for each group [STRIP, PANEL] scales, then as many zeros if there are any, and then
    [words, STRIP, PANEL] words; where scales `stand_apart`, those of all groups come first. The bias is
    [strips, STRIP, PANEL] float32. Scratch memory has SUMS_BYTES. A gated Y has half of the columns.
    """
    codes = Codes(code, bool(zeros), numbers)
    size, per_word, row_bytes = BYTES[kind], 32 // codes.bits, codes.row_bytes
    share_bytes = codes.share_bytes
    head = STRIP * PANEL * BYTES[scales] * (1 + zeros)
    apart = stand_apart(head)

    @kernel("void(intp, intp, intp)", for_kernels=True)
    def multiply(table: int, part: int, member: int) -> None:
        job = job_of(table, part)
        x, x_stride, rows, w, strips, bias, y, y_stride, columns, gated = operands_of(job, part)
        groups, words = job[GROUPS], job[GROUP_WORDS]
        sums = job[SUMS] + member * job[SUMS_APART]
        parts = (rows + GROUP - 1) // GROUP
        width = LANES if gated else PANEL
        group_bytes = row_bytes * words
        between = 0 if apart else head
        stride = between + STRIP * STRIDE * words
        head_stride = head if apart else stride
        strip_bytes = groups * (head + STRIP * STRIDE * words)
        block = max(1, (SHORT if rows <= SHORT_ROWS else BLOCK) // (per_word * words))
        for strip in range(strips):
            left = columns - width * STRIP * strip
            panels = min(STRIP, (left + width - 1) // width)
            clear(sums, panels, rows)
            for first in range(0, groups, block):
                count = min(block, groups - first)
                scales_at = w + strip * strip_bytes
                words_at = scales_at + (groups * head if apart else head) + first * stride
                scales_at += first * head_stride
                for which in range(parts):
                    low = which * rows // parts
                    here = (which + 1) * rows // parts - low
                    row = x + low * x_stride
                    at, shares = row + group_bytes * first, row + group_bytes * groups + share_bytes * first
                    total = sums + STRIDE * low
                    _add_strip(code, numbers, scales, zeros, locality, here, at, x_stride, shares,
                               scales_at, words_at, panels, count, words, total)  # fmt: skip
            for panel in range(panels):
                b = bias + STRIDE * (STRIP * strip + panel) if bias else 0
                for row in range(rows):
                    column = width * (STRIP * strip + panel)
                    place, total = y + row * y_stride + size * column, STRIDE * (MAX_ROWS * panel + row)
                    write_row(kind, size, gated, sums + total, b, place, columns - column)

    return multiply


@inlined
def clear(sums: int, panels: int, rows: int) -> None:
    """Set sums to 0."""
    for panel in range(panels):
        for at in range(0, STRIDE * rows, VECTOR_BYTES):
            store_aligned(sums + STRIDE * MAX_ROWS * panel + at, splat(0.0))
