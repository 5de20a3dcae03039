"""Turns the codes in words into the weights of steps: float32 numbers, or pairs of int16 or bfloat16 numbers.

    word       32 bits with the codes of 8 or 4 numbers that follow each other in a row of a weight
    step       what one multiply-add takes from a word and from a row: 4 bytes

int16: the codes themselves, as whole numbers, for rows that are whole numbers too.

float32: a code is masked out and converted. It is not shifted to the lowest bits of its word, so its value is
larger by a power of two. Rows are prepared with numbers smaller by the same power, which changes none of
their digits.

bfloat16: the code minus the middle of the codes' range is looked up; bfloat16 holds it exactly. For 4 bits
there is a table of 16 numbers. Of 8 bits the highest is the sign, and the others index tables of 128 lower
and 128 higher bytes. As 256 signed numbers have no 0 in their middle, codes with zeros count from 127.5.

e4m3: pairs are looked up like codes of 8 bits. For float32 the bits of a code are moved into a float16
number, which has all the code's digits and denormal numbers too, but is 2^8 times smaller. Rows are prepared
with numbers 2^8 times larger.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from llvmlite import ir

from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    F16,
    I8,
    I16,
    I32,
    PAIRS,
    SUM,
    WORDS,
    Builder,
    Value,
    call,
    opaque,
)
from outrider.engine.cpu.processor import LANES

_BYTES, _HALVES = ir.VectorType(I8, 64), ir.VectorType(I16, 32)
"""A register of AVX-512, as 64 bytes and as 32 numbers of 16 bits."""
Steps: TypeAlias = Callable[[Builder, Value], Iterator[Value]]
"""Makes the steps from a vector of words, in the order of a row's numbers."""
INT4, INT8, E4M3 = "int4", "int8", "e4m3"
"""Kinds of codes."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A kind of codes, and how they are multiplied."""

    kind: str
    """INT4, INT8 or E4M3."""
    zeros: bool
    """True where groups have zeros."""
    numbers: str
    """The kind of numbers that are multiplied: "int16", "bfloat16" or "float32". Words are ordered as in
    `outrider.engine.cpu.strips`."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.kind == INT4 else 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that one word is multiplied with."""
        return BYTES[self.numbers] * (32 // self.bits)

    @property
    def share_bytes(self) -> int:
        """Bytes of what a prepared row says of a group; see `prepared_rows`."""
        return 8 if self.numbers == "int16" else 4

    @property
    def middle(self) -> float:
        """What is subtracted from a code to get its number."""
        if self.numbers == "float32":
            return 0.0
        between = self.numbers == "bfloat16" and self.kind == INT8 and self.zeros
        return 127.5 if between else self.zero

    @property
    def zero(self) -> float:
        """The zero of all groups where groups have no zeros of their own."""
        return 0.0 if self.kind == E4M3 else float(1 << (self.bits - 1))

    def steps(self, builder: Builder) -> Steps:
        """Return what makes the steps. To be called before the loop over words."""
        if self.numbers == "int16":
            return partial(_pairs, self.bits)
        if self.numbers == "float32":
            return _float16 if self.kind == E4M3 else partial(_numbers, self.bits)
        if self.kind == INT4:
            return _four_bits(builder)
        least = self.zero - self.middle
        return _eight_bits(builder, [_e4m3(c) if self.kind == E4M3 else c + least for c in range(128)])


def _pairs(bits: int, builder: Builder, words: Value) -> Iterator[Value]:
    """Yield the codes at each place of both halves of the words."""
    halves = builder.bitcast(words, _MOVED)
    last = 16 // bits - 1
    for place in range(last + 1):
        moved = builder.lshr(halves, _all(bits * place)) if place else halves
        yield moved if place == last else builder.and_(moved, _all((1 << bits) - 1))


def _numbers(bits: int, builder: Builder, words: Value) -> Iterator[Value]:
    """Yield the codes at each place of the words, times 2^(bits place); those at the highest place
    unchanged."""
    last = 32 // bits - 1
    for place in range(last):
        mask = ((1 << bits) - 1) << bits * place
        yield builder.sitofp(builder.and_(words, ir.Constant(WORDS, [mask] * LANES)), SUM)
    yield builder.sitofp(builder.lshr(words, ir.Constant(WORDS, [bits * last] * LANES)), SUM)


def _float16(builder: Builder, words: Value) -> Iterator[Value]:
    """Yield the numbers of e4m3 codes, times 2^-8; words are ordered as in `outrider.engine.cpu.strips`.

    The lower of every two bytes come first: one half of a vector has those of one place, the other half those
    of the next place.
    """
    halves = builder.bitcast(words, _MOVED)
    for high in (builder.shl(halves, _all(8)), halves):
        moved = builder.and_(builder.ashr(high, _all(1)), _all(0xBF80))  # the sign stays, the rest moves
        numbers = builder.bitcast(moved, ir.VectorType(F16, 2 * LANES))
        for first in (0, LANES):
            order = ir.Constant(WORDS, list(range(first, first + LANES)))
            yield builder.fpext(builder.shuffle_vector(numbers, numbers, order), SUM)


_MOVED = ir.VectorType(I16, 2 * LANES)


def _all(number: int) -> Value:
    return ir.Constant(_MOVED, [number] * (2 * LANES))


def _four_bits(builder: Builder) -> Steps:
    """Look up one place of each half of a word. One bit above the code counts too, so the table has all
    twice."""
    table = _held(builder, _HALVES, [_bfloat(code % 16 - 8.0) for code in range(32)])

    def steps(builder: Builder, words: Value) -> Iterator[Value]:
        halves = builder.bitcast(words, _HALVES)
        for place in range(4):
            moved = builder.lshr(halves, ir.Constant(_HALVES, [4 * place] * 32))
            found = call(builder, "llvm.x86.avx512.permvar.hi.512", _HALVES, table, moved)
            yield builder.bitcast(found, PAIRS)

    return steps


def _eight_bits(builder: Builder, numbers: Sequence[float]) -> Steps:
    """Look up both bytes of 64 numbers, then join them to 32 numbers twice. `numbers` has those of codes to
    127."""
    bits = [_bfloat(number) for number in numbers]
    tables = [
        [
            _held(builder, _BYTES, [number >> 8 * byte & 255 for number in half])
            for half in (bits[:64], bits[64:])
        ]
        for byte in range(2)
    ]
    signs = _held(builder, _BYTES, [128] * 64)

    def steps(builder: Builder, words: Value) -> Iterator[Value]:
        codes = builder.bitcast(words, _BYTES)
        low, high = (
            call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, first, codes, second)
            for first, second in tables
        )
        high = builder.or_(high, builder.and_(codes, signs))
        for half in range(2):
            yield builder.bitcast(builder.shuffle_vector(low, high, _in_turn(half)), PAIRS)

    return steps


def _in_turn(half: int) -> Value:
    """Return the order that takes the lower or the higher half of every 16 bytes of two registers, a byte of
    each in turn."""
    firsts = range(8 * half, 64, 16)
    order = [place for first in firsts for byte in range(first, first + 8) for place in (byte, byte + 64)]
    return ir.Constant(ir.VectorType(I32, 64), order)


def _held(builder: Builder, kind: Value, numbers: Sequence[int]) -> Value:
    """Return a constant in a register: LLVM would load a constant that it knows again in each turn of a
    loop."""
    return opaque(builder, ir.Constant(kind, numbers))


def _e4m3(code: int) -> float:
    """The number of a code without a sign. Code 127 is NaN and is never looked up."""
    exponent, digits = divmod(code, 8)
    return math.ldexp(digits + 8 * (exponent > 0), max(exponent, 1) - 10)


def _bfloat(number: float) -> int:
    """The bits of a number that bfloat16 holds."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> 16
