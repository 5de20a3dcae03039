"""Adds up the results of a token's experts, each times its share.

The sum is of float32 in the order of a token's experts and rounded once: its bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.vectors import BYTES, first_lanes, load, multiply_add, splat, splat_at, store
from outrider.engine.cpu.processor import LANES


@cache
def expert_sum(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = BYTES[kind]

    @kernel("void(intp, intp, intp, intp, intp, intp)", keeps_lock=True)
    def add_up(x: int, shares: int, y: int, width: int, count: int, rows: int) -> None:
        """Compute Y [rows, width] from X [rows, count, width] and `shares` [rows, count] float32."""
        for row in range(rows):
            for column in range(0, width, LANES):
                there = first_lanes(width - column)
                total = splat(0.0)
                for place in range(row * count, (row + 1) * count):
                    numbers = load(kind, x + size * (place * width + column), there)
                    total = multiply_add(splat_at(shares + 4 * place), numbers, total)
                store(kind, y + size * (row * width + column), total, there)

    return add_up
