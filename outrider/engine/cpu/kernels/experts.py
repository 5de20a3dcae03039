"""What experts need around their products: which rows each gets, and the sum of a token's experts.

Shapes: M rows, K experts per row, S = M K pairs of a row and one of its experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    first_lanes,
    integers,
    load,
    multiply_add,
    splat,
    splat_at,
    store,
)
from outrider.engine.cpu.processor import LANES


@kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
def sort_pairs(table: int, part: int, member: int) -> None:
    """Sort pairs by expert; those of one expert stay in the order of rows.

    The table: the experts [S] of the pairs, S, K, E; and what is written, int64: the place [S] of each pair,
    the row [S] of each place, and the end [E] of each expert's places.
    """
    call = integers(table)
    chosen, pairs, count, experts = integers(call[0]), call[1], call[2], call[3]
    places, rows, ends = integers(call[4]), integers(call[5]), integers(call[6])
    for expert in range(experts):
        ends[expert] = 0
    for pair in range(pairs):
        ends[chosen[pair]] += 1
    start = 0
    for expert in range(experts):
        size = ends[expert]
        ends[expert] = start
        start += size
    for pair in range(pairs):
        place = ends[chosen[pair]]
        places[pair], rows[place] = place, pair // count
        ends[chosen[pair]] = place + 1


@cache
def expert_sum(kind: str) -> Callable[..., None]:
    """The kernel that adds up the results of a row's experts, each times its share; for a kind of numbers.

    The sum is of float32 in the order of a row's experts and rounded once: its bits do not depend on the
    batch.
    """
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def add_up(table: int, part: int, member: int) -> None:
        """Compute Y [M, width].

        The table: X [S, width], the place [S] of each pair in it, the shares [M, K] float32, Y, width, K, M.
        """
        call = integers(table)
        x, places, shares, y = call[0], integers(call[1]), call[2], call[3]
        width, count, rows = call[4], call[5], call[6]
        for row in range(rows):
            for column in range(0, width, LANES):
                there = first_lanes(width - column)
                total = splat(0.0)
                for pair in range(row * count, (row + 1) * count):
                    numbers = load(kind, x + size * (places[pair] * width + column), there)
                    total = multiply_add(splat_at(shares + 4 * pair), numbers, total)
                store(kind, y + size * (row * width + column), total, there)

    return add_up
