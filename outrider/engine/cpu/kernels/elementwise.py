"""Adds numbers, multiplies them by a factor and converts their dtype, with the bits that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.vectors import BYTES, first_lanes, float_of, integers, load, splat, store
from outrider.engine.cpu.processor import LANES


@cache
def add(kind: str) -> Callable[..., None]:
    """The kernel that adds numbers of a kind to others."""
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def add_all(table: int, part: int, member: int) -> None:
        """Add `count` numbers to those at X. The table: x, what is added, count."""
        call = integers(table)
        x, added, count = call[0], call[1], call[2]
        for at in range(0, count, LANES):
            there, place = first_lanes(count - at), x + size * at
            total = load(kind, place, there) + load(kind, added + size * at, there)
            store(kind, place, total, there)

    return add_all


@cache
def multiply(kind: str) -> Callable[..., None]:
    """The kernel that multiplies numbers of a kind by a factor, which is rounded to float32."""
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def multiply_all(table: int, part: int, member: int) -> None:
        """Make `count` numbers Y = factor X; Y may be X. The table: x, y, count, factor."""
        call = integers(table)
        x, y, count, factor = call[0], call[1], call[2], float_of(call[3])
        for at in range(0, count, LANES):
            there = first_lanes(count - at)
            store(kind, y + size * at, load(kind, x + size * at, there) * splat(factor), there)

    return multiply_all


@cache
def convert(kind: str, made: str) -> Callable[..., None]:
    """The kernel that makes numbers of one kind from those of another."""
    size, made_size = BYTES[kind], BYTES[made]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def convert_all(table: int, part: int, member: int) -> None:
        """Make `count` numbers Y from X. The table: x, y, count."""
        call = integers(table)
        x, y, count = call[0], call[1], call[2]
        for at in range(0, count, LANES):
            there = first_lanes(count - at)
            store(made, y + made_size * at, load(kind, x + size * at, there), there)

    return convert_all
