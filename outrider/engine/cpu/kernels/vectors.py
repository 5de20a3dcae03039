"""What numba's Python lacks for a matrix kernel: vectors of numbers, and the processor's instructions.

A `Vector` holds LANES float32 numbers in one register; a `Mask` says which of them count. Both are
values of numba's: they are assigned, passed on and combined with `+ - * /`. Everything else is a function
below, whose body says which LLVM instruction it becomes. Addresses are integers. A first argument `kind`
is the dtype of numbers in memory, "bfloat16", "float16" or "float32", and has to be known when the kernel is
compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin

from outrider.engine.cpu.processor import HAS_BF16, LANES

WIDE = LANES == 16
"""True where registers are those of AVX-512; otherwise they are those of AVX2, which has no masks for numbers
of 16 bits, and no scaling by powers of two."""
SUFFIX = f"v{LANES}f32"
Builder: TypeAlias = Any
"""llvmlite's `IRBuilder`."""
Value: TypeAlias = Any
"""A value of LLVM; in a kernel, an integer, a `Vector` or a `Mask`."""


class _Bfloat(ir.Type):  # type: ignore[misc]  # llvmlite has no type for it
    """LLVM's bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F16, BF16 = ir.FloatType(), ir.HalfType(), _Bfloat()
VOID, POINTER = ir.VoidType(), ir.PointerType()
SUM = ir.VectorType(F32, LANES)
WORDS, HALVES = ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)
PAIRS = ir.VectorType(BF16, 2 * LANES) if HAS_BF16 else WORDS
"""Two bfloat16 numbers in each lane."""
ROWS = {"bfloat16": HALVES, "float16": HALVES, "float32": SUM}
_SUFFIXES = {2: f"v{LANES}i16", 4: SUFFIX}
BYTES = {"int16": 2, "bfloat16": 2, "float16": 2, "float32": 4}
VECTOR_BYTES = 4 * LANES


class _VectorType(types.Type):  # type: ignore[misc]  # numba has no annotations
    """A type of numba's that is one LLVM value."""

    def __init__(self, name: str, llvm: Value) -> None:
        self.llvm = llvm
        super().__init__(name=name)


@register_default(_VectorType)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    """How numba holds a `_VectorType`."""

    def __init__(self, manager: Any, kind: _VectorType) -> None:
        super().__init__(manager, kind, kind.llvm)


Vector = _VectorType("Vector", SUM)
Mask = _VectorType("Mask", ir.VectorType(I1, LANES))
Address = types.intp


def emits(
    result: Any, *arguments: Any, literals: int = 0
) -> Callable[[Callable[..., Value]], Callable[..., Any]]:
    """Turn a function that builds LLVM code into one that numba can call.

    The builder function takes the IRBuilder, then `literals` arguments whose values must be known when the
    kernel is compiled, then one LLVM value for each of `arguments`; its result is of type `result`.
    """

    def wrap(build: Callable[..., Value]) -> Callable[..., Any]:
        def typing(_context: Any, *given: Any) -> Any:
            fixed = [kind.literal_value for kind in given[:literals]]

            def generate(context: Any, builder: Builder, _signature: Any, values: Any) -> Value:
                made = build(builder, *fixed, *values[literals:])
                return context.get_dummy_value() if result is types.void else made

            return result(*given[:literals], *arguments), generate

        names = [
            Parameter("context", Parameter.POSITIONAL_ONLY),
            *list(signature(build).parameters.values())[1:],
        ]
        typing.__signature__ = Signature(names)  # type: ignore[attr-defined]
        typing.__name__, typing.__doc__ = build.__name__, build.__doc__
        made: Callable[..., Any] = intrinsic(prefer_literal=True)(typing)
        return made

    return wrap


def call(builder: Builder, name: str, result: Value, *arguments: Value) -> Value:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def opaque(builder: Builder, value: Value) -> Value:
    """The same vector, as the result of an instruction that LLVM does not know."""
    kind = ir.FunctionType(value.type, [value.type])
    return builder.asm(kind, "", "=v,0", [value], False)


def pointer(builder: Builder, address: Value) -> Value:
    """The pointer of an address."""
    return builder.inttoptr(address, POINTER)


def spread(builder: Builder, value: Value, count: int = LANES) -> Value:
    """A number in each of `count` lanes."""
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))


@contextmanager
def known(builder: Builder, number: Value, choices: Iterable[int]) -> Iterator[Iterator[int]]:
    """Branch on a number that is one of some choices, so that sums can be registers. Emit code for one choice
    per item."""
    done = builder.append_basic_block("done")
    choice = builder.switch(number, done)

    def each() -> Iterator[int]:
        for count in choices:
            block = builder.append_basic_block(f"known_{count}")
            choice.add_case(I64(count), block)
            builder.position_at_end(block)
            yield count
            builder.branch(done)

    yield each()
    builder.position_at_end(done)


def below(builder: Builder, count: Value, lanes: int) -> Value:
    """A mask of the first `count` of `lanes` lanes; no lane if `count` is negative."""
    order = ir.Constant(ir.VectorType(I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", order, spread(builder, count, lanes))


@emits(Mask, Address)
def first_lanes(builder: Builder, count: Value) -> Value:
    """A mask of the first `count` lanes; all lanes from LANES on, none if `count` is negative."""
    return below(builder, count, LANES)


@emits(Vector, types.float32)
def splat(builder: Builder, value: Value) -> Value:
    """A number in all lanes."""
    return spread(builder, value)


@emits(Vector, Address)
def splat_at(builder: Builder, address: Value) -> Value:
    """The float32 number at an address in all lanes."""
    return spread(builder, builder.load(pointer(builder, address), typ=F32, align=4))


@emits(Vector, Address)
def load_aligned(builder: Builder, address: Value) -> Value:
    """LANES float32 numbers at a multiple of their size."""
    return builder.load(pointer(builder, address), typ=SUM, align=VECTOR_BYTES)


@emits(types.void, Address, Vector)
def store_aligned(builder: Builder, address: Value, value: Value) -> None:
    """Write LANES float32 numbers to a multiple of their size."""
    builder.store(value, pointer(builder, address), align=VECTOR_BYTES)


def numbers_where(builder: Builder, kind: str, address: Value, mask: Value) -> Value:
    """LANES numbers of a kind; 0 where the mask is off, and nothing is read there."""
    row, place = ROWS[kind], pointer(builder, address)

    def masked() -> Value:
        name, zero = f"llvm.masked.load.{_SUFFIXES[BYTES[kind]]}.p0", ir.Constant(row, None)
        return call(builder, name, row, place, I32(BYTES[kind]), mask, zero)

    if WIDE or kind == "float32":
        return masked()
    whole = _whole(builder, mask)
    with builder.if_else(whole) as (all_lanes, some_lanes):
        with all_lanes:
            complete, complete_block = builder.load(place, typ=row, align=BYTES[kind]), builder.block
        with some_lanes:
            partial, partial_block = masked(), builder.block
    found = builder.phi(row)
    found.add_incoming(complete, complete_block)
    found.add_incoming(partial, partial_block)
    return found


@emits(Vector, Address, Mask, literals=1)
def load(builder: Builder, kind: str, address: Value, mask: Value) -> Value:
    """LANES numbers of a kind, as float32; 0 where the mask is off, and nothing is read there."""
    return widened(builder, kind, numbers_where(builder, kind, address, mask))


@emits(types.void, Address, Vector, Mask, literals=1)
def store(builder: Builder, kind: str, address: Value, value: Value, mask: Value) -> None:
    """Write numbers of a kind, rounded to it, where the mask is on."""
    number, place = narrowed(builder, kind, value), pointer(builder, address)

    def masked() -> None:
        name = f"llvm.masked.store.{_SUFFIXES[BYTES[kind]]}.p0"
        call(builder, name, VOID, number, place, I32(BYTES[kind]), mask)

    if WIDE:
        masked()
        return
    with builder.if_else(_whole(builder, mask)) as (all_lanes, some_lanes):
        with all_lanes:
            builder.store(number, place, align=BYTES[kind])
        with some_lanes:
            masked()


@emits(Vector, Vector, literals=1)
def rounded(builder: Builder, kind: str, value: Value) -> Value:
    """Float32 numbers rounded to a kind, as float32 again."""
    return widened(builder, kind, narrowed(builder, kind, value))


def numbers_at(builder: Builder, kind: str, address: Value) -> Value:
    """LANES numbers of a kind as float32."""
    return widened(builder, kind, builder.load(pointer(builder, address), typ=ROWS[kind], align=BYTES[kind]))


def widened(builder: Builder, kind: str, numbers: Value) -> Value:
    """Numbers of a kind as float32."""
    if kind == "float32":
        return numbers
    if kind == "float16":
        return builder.fpext(builder.bitcast(numbers, ir.VectorType(F16, LANES)), SUM)
    return builder.bitcast(builder.shl(builder.zext(numbers, WORDS), words(16)), SUM)


def narrowed(builder: Builder, kind: str, value: Value) -> Value:
    """Float32 numbers rounded to a kind: to the nearest, ties to even."""
    if kind == "float32":
        return value
    if kind == "float16" or HAS_BF16:
        number = F16 if kind == "float16" else BF16
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(number, LANES)), HALVES)
    word = builder.bitcast(value, WORDS)
    high = builder.lshr(word, words(16))
    even = builder.and_(high, words(1))
    nearest = builder.lshr(builder.add(word, builder.add(even, words(0x7FFF))), words(16))
    quiet = builder.or_(high, words(0x40))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)
    return builder.trunc(kept, HALVES)


def words(value: int) -> Value:
    """An integer in all lanes."""
    return ir.Constant(WORDS, [value] * LANES)


def _whole(builder: Builder, mask: Value) -> Value:
    """True where all lanes of the mask count."""
    return builder.icmp_unsigned("==", builder.bitcast(mask, ir.IntType(LANES)), ir.IntType(LANES)(-1))


@emits(Vector, Vector, Vector, Vector)
def multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a b + c, rounded once."""
    return fused(builder, a, b, c)


def fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a b + c, rounded once."""
    return call(builder, f"llvm.fma.{SUFFIX}", SUM, a, b, c)


def fetch(builder: Builder, locality: int, address: Value) -> None:
    """See `prefetch`."""
    call(builder, "llvm.prefetch.p0", VOID, pointer(builder, address), I32(0), I32(locality), I32(1))


@emits(Vector, Vector)
def nearest(builder: Builder, x: Value) -> Value:
    """The nearest integers; ties to even."""
    return call(builder, f"llvm.roundeven.{SUFFIX}", SUM, x)


@emits(Vector, Vector, Vector)
def minimum(builder: Builder, x: Value, limit: Value) -> Value:
    """The smaller of x and `limit` in each lane; x where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, limit), limit, x)


@emits(Vector, Vector, Vector)
def maximum(builder: Builder, x: Value, limit: Value) -> Value:
    """The larger of x and `limit` in each lane; x where x is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, limit), limit, x)


@emits(Vector, Vector, Vector)
def times_power_of_two(builder: Builder, x: Value, exponent: Value) -> Value:
    """x 2^exponent, for whole exponents from -150 to 128."""
    if WIDE:
        zero = ir.Constant(SUM, None)
        return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", SUM, x, exponent, zero, I16(-1), I32(4))
    whole = builder.fptosi(exponent, WORDS)
    half = builder.ashr(whole, words(1))
    for part in (half, builder.sub(whole, half)):  # two factors: a single one may be outside float32
        factor = builder.shl(builder.add(part, words(127)), words(23))
        x = builder.fmul(x, builder.bitcast(factor, SUM))
    return x


@emits(types.float32, Vector)
def added_up(builder: Builder, x: Value) -> Value:
    """The sum of all lanes, in a fixed order."""
    zero = ir.Constant(F32, 0.0)
    kind = ir.FunctionType(F32, [F32, SUM])
    add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.{SUFFIX}")
    return builder.call(add, [zero, x], fastmath=("reassoc",))


@emits(types.void, Address, literals=1)
def prefetch(builder: Builder, locality: int, address: Value) -> None:
    """Fetch a cache line: locality 3 into all caches, 2 past the first one, 0 past the shared one."""
    fetch(builder, locality, address)


@emits(Vector, Vector, Mask)
def kept(builder: Builder, x: Value, mask: Value) -> Value:
    """x where the mask is on, otherwise 0."""
    return builder.select(mask, x, ir.Constant(SUM, None))


@emits(Vector, Vector)
def negative(builder: Builder, x: Value) -> Value:
    """-x."""
    return builder.fneg(x)


def _define(operation: Any, instruction: str) -> None:
    """Make an operator of Python work lane by lane."""

    @infer_global(operation)
    class _OfVectors(ConcreteTemplate):  # type: ignore[misc]
        cases = (Vector(Vector, Vector),)

    @lower_builtin(operation, Vector, Vector)  # type: ignore[untyped-decorator]
    def combined(_context: Any, builder: Builder, _signature: Any, values: Any) -> Value:
        return getattr(builder, instruction)(*values)


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")
_define(operator.truediv, "fdiv")


@emits(Vector, Vector)
def root(builder: Builder, x: Value) -> Value:
    """The square root."""
    return call(builder, f"llvm.sqrt.{SUFFIX}", SUM, x)


@emits(types.void, Address, Address, Address)
def copy(builder: Builder, target: Value, source: Value, count: Value) -> None:
    """Copy bytes."""
    places = pointer(builder, target), pointer(builder, source)
    call(builder, "llvm.memcpy.p0.p0.i64", VOID, *places, count, I1(0))


@emits(types.void, Address, Address)
def copy_word(builder: Builder, target: Value, source: Value) -> None:
    """Copy 4 bytes by one move. LLVM would turn moves that it may combine into slow scatters."""
    word = builder.load(pointer(builder, source), typ=I32, align=2)
    builder.store_atomic(word, builder.inttoptr(target, I32.as_pointer()), "monotonic", 4)


@emits(types.CPointer(types.int64), Address)
def integers(builder: Builder, address: Value) -> Value:
    """The int64 numbers at an address, to be indexed like an array; `floats` and `vectors` work the same
    way."""
    return builder.inttoptr(address, I64.as_pointer())


@emits(types.CPointer(types.float32), Address)
def floats(builder: Builder, address: Value) -> Value:
    """The float32 numbers at an address."""
    return builder.inttoptr(address, F32.as_pointer())


@emits(types.float64, Address)
def float_of(builder: Builder, bits: Value) -> Value:
    """The float64 number that has these bits."""
    return builder.bitcast(bits, ir.DoubleType())


@emits(types.CPointer(Vector), Address)
def vectors(builder: Builder, address: Value) -> Value:
    """The vectors at an address, a multiple of their size."""
    return builder.inttoptr(address, SUM.as_pointer())


@emits(types.CPointer(Vector), literals=1)
def zeros(builder: Builder, count: int) -> Value:
    """Return `count` vectors of 0.

    They stay in registers if LLVM unrolls every loop over them. It does so for a fixed number of turns and
    little work: LANES turns with a few operations each are little enough.
    """
    array = cgutils.alloca_once(builder, ir.ArrayType(SUM, count), zfill=True)
    return builder.bitcast(array, SUM.as_pointer())
