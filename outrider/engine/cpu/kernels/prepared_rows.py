"""Rows as `outrider.engine.cpu.kernels.quantized_matmul` multiplies them: groups of numbers, and for each
group a number that the zero of a weight's group is multiplied with, here called its share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types

from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.steps import largest_lane
from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    F32,
    HALVES,
    I32,
    WORDS,
    Address,
    Builder,
    Value,
    Vector,
    added_up,
    emits,
    first_lanes,
    floats,
    integers,
    load,
    load_aligned,
    maximum,
    nearest,
    negative,
    pointer,
    splat,
    store,
)
from outrider.engine.cpu.processor import LANES


@cache
def prepare_rows(kind: str, numbers: str) -> Callable[..., None]:
    """The kernel that prepares rows of a kind of numbers to be multiplied as `numbers` (see `codes`).

    It makes Y from X [rows, numbers]: `groups` groups of `group` numbers, a multiple of LANES, with zeros
    after the last number; and then [groups] shares.
    """
    return _whole_rows(kind) if numbers == "int16" else _scaled_rows(kind, numbers)


def _scaled_rows(kind: str, numbers: str) -> Callable[..., None]:
    size, made_size = BYTES[kind], BYTES[numbers]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def prepare(table: int, part: int, member: int) -> None:
        """Numbers times `factors` [LANES]. A group's share is the negated float32 sum of its numbers.

        The table: x, numbers, rows; group, groups, factors; y, and bytes from row to row there.
        """
        call = integers(table)
        x, width, rows = call[0], call[1], call[2]
        group, groups, factors = call[3], call[4], call[5]
        y, y_stride = call[6], call[7]
        scaled, whole = load_aligned(factors), first_lanes(LANES)
        for row in range(rows):
            given, made = x + size * width * row, y + y_stride * row
            shares = floats(made + made_size * group * groups)
            for index in range(groups):
                total = splat(0.0)
                for column in range(group * index, group * (index + 1), LANES):
                    part = load(kind, given + size * column, first_lanes(width - column))
                    total = total + part
                    store(numbers, made + made_size * column, part * scaled, whole)
                shares[index] = -added_up(total)

    return prepare


def _whole_rows(kind: str) -> Callable[..., None]:
    size = BYTES[kind]

    @kernel("void(intp, intp, intp)", keeps_lock=True, for_kernels=True)
    def prepare(table: int, part: int, member: int) -> None:
        """Whole numbers of 16 bits: those of a group divided by a power of two, and rounded. A group's share
        is the negated int32 sum of these. The power follows it as float32, or NaN if a number of the group is
        infinite or NaN.

        The table is that of `_scaled_rows`; its factors are not read.
        """
        call = integers(table)
        x, width, rows = call[0], call[1], call[2]
        group, groups = call[3], call[4]
        y, y_stride = call[6], call[7]
        for row in range(rows):
            given, made = x + size * width * row, y + y_stride * row
            share = made + 2 * group * groups
            for index in range(groups):
                largest, none = splat(0.0), splat(0.0)
                for column in range(group * index, group * (index + 1), LANES):
                    part = load(kind, given + size * column, first_lanes(width - column))
                    largest = maximum(maximum(largest, part), negative(part))
                    none = none + (part - part)
                power = power_below(largest_lane(largest))
                factor, total = splat(np.float32(1.0) / power), splat(0.0)
                for column in range(group * index, group * (index + 1), LANES):
                    part = load(kind, given + size * column, first_lanes(width - column))
                    part = nearest(part * factor)
                    total = total + part
                    store_whole(made + 2 * column, part)
                store_share(share + 8 * index, -added_up(total), power + added_up(none))

    return prepare


@emits(types.float32, types.float32)
def power_below(builder: Builder, largest: Value) -> Value:
    """The power of two by which a number is divided to be from 2^14 to 2^15; at least 2^-114."""
    exponent = builder.and_(builder.bitcast(largest, I32), I32(0x7F800000))
    least = I32(27 << 23)
    exponent = builder.select(builder.icmp_signed("<", exponent, least), least, exponent)
    return builder.bitcast(builder.sub(exponent, I32(14 << 23)), F32)


@emits(types.void, Address, Vector)
def store_whole(builder: Builder, address: Value, numbers: Value) -> None:
    """Write whole numbers as int16."""
    whole = builder.trunc(builder.fptosi(numbers, WORDS), HALVES)
    builder.store(whole, pointer(builder, address), align=2)


@emits(types.void, Address, types.float32, types.float32)
def store_share(builder: Builder, address: Value, total: Value, power: Value) -> None:
    """Write a whole number as int32, and a power after it."""
    both = ir.Constant(ir.VectorType(I32, 2), ir.Undefined)
    for place, word in enumerate((builder.fptosi(total, I32), builder.bitcast(power, I32))):
        both = builder.insert_element(both, word, I32(place))
    builder.store(both, pointer(builder, address), align=4)
