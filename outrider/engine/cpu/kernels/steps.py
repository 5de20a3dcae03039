"""Products of steps. A step is 4 bytes of a row: one float32 number, or a pair of bfloat16, float16 or int16
numbers.

A vector holds LANES steps, one in each lane. The products of a lane's step are added to that lane of a sum,
rounded after each, in the order of the instruction VDPBF16PS: first the higher number, then the lower.

Columns of float16 weights are the exception: a step has first one number of each column, then the other one,
because the processor turns float16 numbers into float32 only where they follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir
from numba import types

from outrider.engine.cpu.kernels.vectors import (
    BYTES,
    F32,
    HALVES,
    I16,
    I32,
    I64,
    PAIRS,
    SUFFIX,
    SUM,
    VECTOR_BYTES,
    WIDE,
    WORDS,
    Address,
    Builder,
    Mask,
    Value,
    Vector,
    call,
    emits,
    fused,
    narrowed,
    numbers_at,
    numbers_where,
    opaque,
    pointer,
    spread,
    widened,
    words,
)
from outrider.engine.cpu.processor import HAS_BF16, LANES

TOGETHER = {"bfloat16": 2, "float16": 2, "float32": 1}
"""Numbers of a step."""
_STEPS = {"bfloat16": PAIRS, "float16": WORDS, "float32": SUM, "int16": ir.VectorType(I16, 2 * LANES)}
"""LANES steps."""
_MULTIPLY_PAIRS = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
"""The sum of both products of int16 numbers, as int32."""


def has_instruction(kind: str) -> bool:
    """True where one instruction multiplies steps of a kind of numbers."""
    return kind == "float32" or (kind == "bfloat16" and HAS_BF16)


def step_weights(builder: Builder, kind: str, address: Value) -> Value:
    """A vector of steps at a multiple of its size."""
    return builder.load(pointer(builder, address), typ=_STEPS[kind], align=VECTOR_BYTES)


def step_numbers(builder: Builder, kind: str, address: Value) -> Value:
    """A step of a row, in all lanes."""
    word = builder.load(pointer(builder, address), typ=I32, align=BYTES[kind])
    return builder.bitcast(spread(builder, word), _STEPS[kind])


def factors(builder: Builder, kind: str, address: Value) -> Iterator[tuple[list[Value], int]]:
    """Yield what the multiply-adds of two vectors of steps, the first of them at an address, take one after
    the other, and where the number that it is multiplied with stands in a row, in bytes: the steps, or
    without an instruction for pairs their numbers, as float32.
    """
    if has_instruction(kind):
        yield [step_weights(builder, kind, place) for place in _both(builder, address)], 0
    elif kind == "float16":
        for place in (0, 4):
            first = builder.add(address, I64(place * VECTOR_BYTES // 4))
            halves = _both(builder, first, VECTOR_BYTES // 2)
            yield [numbers_at(builder, kind, half) for half in halves], place
    else:
        for place, half in ((4, _higher), (0, _lower)):
            again = hidden(builder, address)
            pairs = [step_weights(builder, kind, at) for at in _both(builder, again)]
            yield [half(builder, kind, pair) for pair in pairs], place


def hidden(builder: Builder, address: Value) -> Value:
    """The same address, which LLVM takes for another one: it reads again what would take a register that sums
    need."""
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], False)


def _both(builder: Builder, address: Value, size: int = VECTOR_BYTES) -> Iterator[Value]:
    """Yield the addresses of two vectors of `size` bytes."""
    for half in range(2):
        yield builder.add(address, I64(size * half))


def add_products(builder: Builder, kind: str, total: Value, weights: Value, numbers: Value) -> Value:
    """Add the products of two vectors of steps to `total`."""
    if kind == "float32":
        return fused(builder, weights, numbers, total)
    if kind == "int16":
        # LLVM would reorder the additions, and then has too few registers.
        return opaque(builder, builder.add(total, call(builder, _MULTIPLY_PAIRS, WORDS, weights, numbers)))
    if has_instruction(kind):
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUM, total, weights, numbers)
    for half in (_higher, _lower):
        total = fused(builder, half(builder, kind, weights), half(builder, kind, numbers), total)
    return total


def _lower(builder: Builder, kind: str, pairs: Value) -> Value:
    if kind == "float16":
        return widened(builder, kind, builder.trunc(pairs, HALVES))
    return builder.bitcast(builder.shl(pairs, words(16)), SUM)


def _higher(builder: Builder, kind: str, pairs: Value) -> Value:
    if kind == "float16":
        return _lower(builder, kind, builder.lshr(pairs, words(16)))
    return builder.bitcast(builder.and_(pairs, words(0xFFFF0000)), SUM)


@emits(Vector, Vector, Vector, Address, literals=1)
def add_step(builder: Builder, kind: str, total: Value, numbers: Value, address: Value) -> Value:
    """Add the products of a vector of steps and the one step at an address."""
    steps = builder.bitcast(numbers, _STEPS[kind])
    return add_products(builder, kind, total, steps, step_numbers(builder, kind, address))


@emits(Vector, Vector, Address, Address, literals=1)
def add_steps(builder: Builder, kind: str, total: Value, weights: Value, row: Value) -> Value:
    """Add the products of a vector of weights, at a multiple of its size, and LANES steps of a row."""
    numbers = builder.load(pointer(builder, row), typ=_STEPS[kind], align=BYTES[kind])
    return add_products(builder, kind, total, step_weights(builder, kind, weights), numbers)


@emits(Vector, Vector, Address, Address, Mask, literals=1)
def add_steps_where(
    builder: Builder, kind: str, total: Value, weights: Value, row: Value, mask: Value
) -> Value:
    """Do as `add_steps`, but read no step of the row where the mask is off."""
    numbers = builder.bitcast(numbers_where(builder, "float32", row, mask), _STEPS[kind])
    return add_products(builder, kind, total, step_weights(builder, kind, weights), numbers)


@emits(Vector, Vector, Vector, Vector, literals=1)
def add_pair(builder: Builder, kind: str, total: Value, weights: Value, numbers: Value) -> Value:
    """Add the products of two vectors of steps to `total`."""
    step = _STEPS[kind]
    return add_products(builder, kind, total, builder.bitcast(weights, step), builder.bitcast(numbers, step))


@emits(Vector, Vector, Vector, literals=1)
def pair(builder: Builder, kind: str, first: Value, second: Value) -> Value:
    """Steps whose products are added in this order; only the first number counts in float32."""
    if kind == "float32":
        return first
    return _paired(builder, narrowed(builder, kind, first), narrowed(builder, kind, second))


@emits(Vector, Address, Address, Mask, literals=1)
def pair_at(builder: Builder, kind: str, first: Value, second: Value, mask: Value) -> Value:
    """The steps of `pair` for numbers at two addresses; nothing is read where the mask is off."""
    number = numbers_where(builder, kind, first, mask)
    if kind == "float32":
        return number
    return _paired(builder, number, numbers_where(builder, kind, second, mask))


def _paired(builder: Builder, first: Value, second: Value) -> Value:
    order = [index for lane in range(LANES) for index in (lane, LANES + lane)]
    return builder.bitcast(_joined(builder, second, first, order), SUM)


@emits(types.void, Address, Vector, literals=1)
def store_in_pairs(builder: Builder, kind: str, address: Value, value: Value) -> None:
    """Write the numbers of a vector as steps whose products are added in the order of the numbers."""
    numbers = narrowed(builder, kind, value)
    if TOGETHER[kind] == 2:
        numbers = _joined(builder, numbers, numbers, [lane ^ 1 for lane in range(LANES)])
    builder.store(numbers, pointer(builder, address), align=BYTES[kind] * LANES)


@emits(Vector, types.CPointer(Vector))
def totals(builder: Builder, sums: Value) -> Value:
    """The total of each of LANES vectors in a lane of its own. The upper half of a vector's lanes is added to
    the lower half, of these again the upper half to the lower half, and so on."""
    vectors = [builder.load(builder.gep(sums, [I32(index)]), typ=SUM) for index in range(LANES)]
    width = LANES
    while len(vectors) > 1:
        width //= 2
        lower = [lane for lane in range(2 * LANES) if lane % (2 * width) < width]
        upper = [lane + width for lane in lower]
        vectors = [
            builder.fadd(_joined(builder, x, y, lower), _joined(builder, x, y, upper))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _joined(builder: Builder, x: Value, y: Value, lanes: Sequence[int]) -> Value:
    """The lanes with these numbers of x followed by y."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


@emits(Vector, Vector, Mask)
def visible(builder: Builder, x: Value, mask: Value) -> Value:
    """x where the mask is on, otherwise -infinity."""
    return builder.select(mask, x, ir.Constant(SUM, [float("-inf")] * LANES))


@emits(types.float32, Vector)
def largest_lane(builder: Builder, x: Value) -> Value:
    """The largest number of a vector."""
    return call(builder, f"llvm.vector.reduce.fmax.{SUFFIX}", F32, x)
