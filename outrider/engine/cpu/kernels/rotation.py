"""Rotary positions of queries and keys, perhaps after a norm of each head, and storing keys and values.

Columns i and half + i of a head are a pair; those from 2 half on stay as they are. Numbers are rounded where
the modules of a model round them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from outrider.engine.cpu.kernels.compiling import inlined, kernel
from outrider.engine.cpu.kernels.norm import one_over_root
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    Value,
    copy,
    first_lanes,
    float_of,
    integers,
    load,
    multiply_add,
    negative,
    rounded,
    splat,
    store,
)
from outrider.engine.cpu.processor import LANES


@inlined
def _squares(kind: str, low: int, high: int, size: int, half: int) -> Value:
    """The sum of squares of a head, in parts: one per lane."""
    total = splat(0.0)
    for column in range(0, half, LANES):
        there = first_lanes(half - column)
        for part in (low, high):
            numbers = load(kind, part + size * column, there)
            total = multiply_add(numbers, numbers, total)
    return total


@cache
def rotation(kind: str) -> Callable[..., None]:
    """The kernel for a kind of numbers."""
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def turn(table: int, part: int, member: int) -> None:
        """Rotate the first 2 half of `width` numbers of the first `heads` heads of QKV [rows, row_bytes].

        `angles` [positions, 2, half] float32 hold the cosines and sines of a position, `positions` [rows]
        int64. With `scale` [heads, width] float32, which may be 0, a head of 2 half numbers is normalised
        before: divided by the root of its mean square plus eps and multiplied with its row; `share` is 1 /
        width. Then, for the first `stored` rows, `entry_bytes` from byte `own_bytes` on are copied to
        `entries` [slots, entry_bytes].

        The table: qkv, row_bytes, rows, heads, width, half; angles, positions; entries, slots, stored,
        own_bytes, entry_bytes; scale, share, eps.
        """
        call = integers(table)
        qkv, row_bytes, rows, heads, width, half = call[0], call[1], call[2], call[3], call[4], call[5]
        angles, positions = call[6], call[7]
        entries, slots, stored, own_bytes, entry_bytes = call[8], call[9], call[10], call[11], call[12]
        scale, share, eps = call[13], float_of(call[14]), float_of(call[15])
        for row in range(rows):
            cosines = angles + 8 * half * integers(positions)[row]
            sines = cosines + 4 * half
            for head in range(heads):
                low = qkv + row * row_bytes + size * width * head
                high = low + size * half
                low_scale = scale + 4 * width * head
                high_scale = low_scale + 4 * half
                inverse = splat(1.0)
                if scale:
                    inverse = one_over_root(_squares(kind, low, high, size, half), share, eps)
                for column in range(0, half, LANES):
                    there = first_lanes(half - column)
                    x = load(kind, low + size * column, there)
                    y = load(kind, high + size * column, there)
                    if scale:
                        x = rounded(kind, x * inverse * load("float32", low_scale + 4 * column, there))
                        y = rounded(kind, y * inverse * load("float32", high_scale + 4 * column, there))
                    cos = load("float32", cosines + 4 * column, there)
                    sin = load("float32", sines + 4 * column, there)
                    store(kind, low + size * column, multiply_add(x, cos, negative(y * sin)), there)
                    store(kind, high + size * column, multiply_add(y, cos, x * sin), there)
            if row < stored:
                entry = entries + integers(slots)[row] * entry_bytes
                copy(entry, qkv + row * row_bytes + own_bytes, entry_bytes)

    return turn
