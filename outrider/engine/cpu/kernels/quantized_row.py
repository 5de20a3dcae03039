"""One row times weights of 4 or 8 bits, with the bits that matrix tiles compute, in less time than they take.

See `quantized_tile_matmul`. For a column of a tile, TDPBF16PS adds the products of the even numbers up, and
those of the odd ones, and then both to the sum. Two chains of float32 multiply-adds do the same: products of
bfloat16 numbers are exact in float32. Denormal numbers have to count as 0 (`tiles.flush_denormals`).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from outrider.engine.cpu.kernels.codes import Codes, Steps
from outrider.engine.cpu.kernels.row_matmul import LINE
from outrider.engine.cpu.kernels.tile_matmul import AHEAD, NUMBERS
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    F32,
    I32,
    I64,
    SUM,
    VECTOR_BYTES,
    WORDS,
    Address,
    Builder,
    Value,
    emits,
    fetch,
    fused,
    numbers_at,
    pointer,
    spread,
    words,
)
from outrider.engine.cpu.panels import STRIDE
from outrider.engine.cpu.processor import LANES

EVEN, ODD = range(2)


def head_bytes(scales: str, zeros: int) -> int:
    """Bytes of a group's scales, and of as many zeros if there are any, in a panel."""
    return 2 * LANES * BYTES[scales] * (1 + zeros)


@emits(types.void, *[Address] * 6, literals=5)
def add_row(
    builder: Builder, code: str, scales: str, zeros: int, locality: int, panels: int, x: Value, share: Value,
    group: Value, apart: Value, group_words: Value, sums: Value,
) -> None:  # fmt: skip
    """Add the products of a row and a group of several panels, `apart` bytes from each other, to the panels'
    sums. `share` is the address of the row's share, and `group_words` the number of a group's words."""
    groups = [builder.add(group, builder.mul(apart, I64(panel))) for panel in range(panels)]
    _Row(Codes(code, bool(zeros), "bfloat16"), scales, locality, groups).add(
        builder, x, share, group_words, sums
    )


class _Row:
    """The code of `add_row`."""

    def __init__(self, codes: Codes, scales: str, locality: int, groups: list[Value]) -> None:
        self.codes, self.scales, self.locality, self.groups = codes, scales, locality, groups
        self.half = LANES * BYTES[scales]
        self.head = head_bytes(scales, codes.zeros)
        self.cells = [(panel, half) for panel in range(len(groups)) for half in range(2)]

    def add(self, builder: Builder, x: Value, share: Value, group_words: Value, sums: Value) -> None:
        """Add a group."""
        zero = ir.Constant(SUM, None)
        steps = self.codes.steps(builder)
        for group in self.groups:
            for at in range(0, self.head, LINE):
                fetch(builder, self.locality, builder.add(group, I64(AHEAD + at)))
        totals = {cell: cgutils.alloca_once_value(builder, zero) for cell in self.cells}
        chains = {
            (*cell, chain): cgutils.alloca_once(builder, SUM) for cell in self.cells for chain in (EVEN, ODD)
        }
        tile_words = I64(NUMBERS * self.codes.bits // 32)
        with cgutils.for_range(builder, builder.udiv(group_words, tile_words)) as tile:
            for chain in chains.values():
                builder.store(zero, chain)
            with cgutils.for_range(builder, tile_words) as word:
                index = builder.add(builder.mul(tile.index, tile_words), word.index)
                self._add_word(builder, steps, chains, x, index)
            for cell, total in totals.items():
                both = builder.fadd(*(builder.load(chains[*cell, chain]) for chain in (EVEN, ODD)))
                builder.store(builder.fadd(builder.load(total), both), total)
        for cell, total in totals.items():
            self._end(builder, cell, builder.load(total), share, sums)

    def _add_word(
        self,
        builder: Builder,
        steps: Steps,
        chains: dict[tuple[int, int, int], Value],
        x: Value,
        index: Value,
    ) -> None:
        """Add the products of a word of each column. Fetch as many bytes from AHEAD on."""
        line = builder.add(builder.mul(index, I64(STRIDE)), I64(self.head))
        first = builder.add(x, builder.mul(index, I64(self.codes.row_bytes)))
        numbers = [
            builder.load(pointer(builder, builder.add(first, I64(at))), typ=I32, align=2)
            for at in range(0, self.codes.row_bytes, 4)
        ]
        pairs = [_parts(builder, spread(builder, number)) for number in numbers]
        for panel, half in self.cells:
            at = builder.add(builder.add(self.groups[panel], line), I64(VECTOR_BYTES * half))
            fetch(builder, self.locality, builder.add(at, I64(AHEAD)))
            word = builder.load(pointer(builder, at), typ=WORDS, align=VECTOR_BYTES)
            for step, pair in zip(steps(builder, word), pairs, strict=True):
                weights = _parts(builder, builder.bitcast(step, WORDS))
                for chain in (EVEN, ODD):
                    place = chains[panel, half, chain]
                    made = fused(builder, weights[chain], pair[chain], builder.load(place))
                    builder.store(made, place)

    def _end(self, builder: Builder, cell: tuple[int, int], total: Value, share: Value, sums: Value) -> None:
        """Add half a panel's sum of the group, times its scale, to that of the panel."""
        panel, half = cell
        scale = builder.add(self.groups[panel], I64(self.half * half))
        if self.codes.zeros:
            zero = numbers_at(builder, self.scales, builder.add(scale, I64(2 * self.half)))
            zero = builder.fsub(zero, ir.Constant(SUM, [self.codes.middle] * LANES))
            own = builder.load(pointer(builder, share), typ=F32, align=4)
            total = fused(builder, zero, spread(builder, own), total)
        place = pointer(builder, builder.add(sums, I64(STRIDE * panel + VECTOR_BYTES * half)))
        before = builder.load(place, typ=SUM, align=VECTOR_BYTES)
        made = fused(builder, numbers_at(builder, self.scales, scale), total, before)
        builder.store(made, place, align=VECTOR_BYTES)


def _parts(builder: Builder, pairs: Value) -> tuple[Value, Value]:
    """The even and the odd numbers of pairs of bfloat16 numbers, as float32."""
    even, odd = builder.shl(pairs, words(16)), builder.and_(pairs, words(0xFFFF0000))
    return builder.bitcast(even, SUM), builder.bitcast(odd, SUM)
