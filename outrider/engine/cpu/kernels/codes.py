"""How the codes of a vector of words become weights: float32 numbers, or pairs of bfloat16 ones.

A word has the codes of 8 or 4 numbers that follow each other in a row of the weight, a vector of words those
of LANES columns. A step is what one multiply-add takes of a word: a number or a pair.

float32: a code is cut out and converted. It is not moved to the lowest bits of its word: it counts a power of
two more there, and rows are prepared with numbers that much smaller, which changes none of their digits.

Pairs: two codes are looked up in tables of what they stand for, less the middle of their range, which bfloat16
holds exactly: 4 bits in one of 16 numbers; of 8 bits the lower 7 in one of 128, whose bytes are two tables,
and the highest is the sign. So these count from 127.5, between two codes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from llvmlite import ir

from outrider.engine.cpu.kernels.vectors import I8, I16, I32, PAIRS, SUM, WORDS, Builder, Value, call
from outrider.engine.cpu.processor import LANES

BYTES, HALVES = ir.VectorType(I8, 64), ir.VectorType(I16, 32)
"""Of a register of AVX-512."""


def middle(bits: int, *, pairs: bool, zeros: bool) -> float:
    """What is less than its code in the number of a code."""
    if not pairs:
        return 0.0
    return 127.5 if bits == 8 and zeros else float(1 << (bits - 1))


Steps: TypeAlias = Callable[[Builder, Value], Iterator[Value]]
"""Makes of a vector of words their steps, in the order of the row's numbers."""


def steps(builder: Builder, bits: int, *, pairs: bool, zeros: bool) -> Steps:
    """What makes the steps of words; called before the loop over these. For pairs the codes lie in the order
    of `outrider.engine.cpu.quantized_matmul`."""
    if not pairs:
        return partial(_numbers, bits)
    return _four_bits(builder) if bits == 4 else _eight_bits(builder, 0.5 if zeros else 0.0)


def _numbers(bits: int, builder: Builder, words: Value) -> Iterator[Value]:
    """The codes at a place of words, times 2^(bits place); the highest as they are."""
    last = 32 // bits - 1
    for place in range(last):
        mask = ((1 << bits) - 1) << bits * place
        yield builder.sitofp(builder.and_(words, ir.Constant(WORDS, [mask] * LANES)), SUM)
    yield builder.sitofp(builder.lshr(words, ir.Constant(WORDS, [bits * last] * LANES)), SUM)


def _four_bits(builder: Builder) -> Steps:
    """Of each half of a word a place; what stands above it there is no part of the place in the table."""
    table = _held(builder, HALVES, [_bfloat(code % 16 - 8.0) for code in range(32)])

    def made(builder: Builder, words: Value) -> Iterator[Value]:
        halves = builder.bitcast(words, HALVES)
        for place in range(4):
            moved = builder.lshr(halves, ir.Constant(HALVES, [4 * place] * 32))
            found = call(builder, "llvm.x86.avx512.permvar.hi.512", HALVES, table, moved)
            yield builder.bitcast(found, PAIRS)

    return made


def _eight_bits(builder: Builder, least: float) -> Steps:
    """Both bytes of 64 numbers, which are then put together, 32 at a time; `least` is the number of code 0."""
    numbers = [_bfloat(code + least) for code in range(128)]
    low, high = (
        [_held(builder, BYTES, [number >> 8 * byte & 255 for number in numbers[first : first + 64]]) for first in (0, 64)]
        for byte in (0, 1)
    )
    signs = _held(builder, BYTES, [128] * 64)

    def made(builder: Builder, words: Value) -> Iterator[Value]:
        codes = builder.bitcast(words, BYTES)
        lower, higher = (
            call(builder, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, table[0], codes, table[1])
            for table in (low, high)
        )
        higher = builder.or_(higher, builder.and_(codes, signs))
        for first in (0, 8):
            yield builder.bitcast(builder.shuffle_vector(lower, higher, _interleaved(first)), PAIRS)

    return made


def _interleaved(first: int) -> Value:
    """Of every 16 bytes of two registers 8 from `first` on, in turn."""
    starts = range(first, 64, 16)
    places = [at for lane in starts for byte in range(lane, lane + 8) for at in (byte, byte + 64)]
    return ir.Constant(ir.VectorType(I32, 64), places)


def _held(builder: Builder, kind: Value, numbers: Sequence[int]) -> Value:
    """A constant in a register: LLVM takes it for a result that it does not know, else it would load a known
    constant again in each turn of a loop."""
    return builder.asm(ir.FunctionType(kind, [kind]), "", "=v,0", [ir.Constant(kind, numbers)], False)


def _bfloat(number: float) -> int:
    """The bits of a number that bfloat16 holds."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> 16
