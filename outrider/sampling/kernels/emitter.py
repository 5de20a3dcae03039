"""Writes LLVM IR for eight tokens at a time: numbers, variables, branches and loops.

    number    one of 64 bits, or eight of them as a vector; a `float` row is loaded as eight float32
    variable  a place on the stack, which the optimiser turns into a register

Vectors are legal on every processor: where there is no AVX-512 they are cut into shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 8
I1, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
BITS, INTS, SHORTS = (ir.VectorType(kind, LANES) for kind in (I1, I64, I32))
FLOATS, DOUBLES = ir.VectorType(F32, LANES), ir.VectorType(F64, LANES)
BYTES = {I32: 4, I64: 8, F32: 4, F64: 8}

Value = Any
"""A value of llvmlite; Python numbers become constants beside one."""


class Emitter:
    """The body of one function, written from top to bottom."""

    def __init__(self, function: Value) -> None:
        self.build = ir.IRBuilder(function.append_basic_block("entry"))
        self.module = function.module

    def constant(self, kind: Value, value: float) -> Value:
        """A number, in every lane of a vector."""
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [value] * kind.count)
        return ir.Constant(kind, value)

    def table(self, name: str, values: Sequence[float], kind: Value = I64) -> Value:
        """The address of constants that are part of the code."""
        known = self.module.globals.get(name)
        if known is None:
            row = ir.ArrayType(kind, len(values))
            known = ir.GlobalVariable(self.module, row, name)
            known.initializer = ir.Constant(row, list(values))
            known.global_constant, known.linkage, known.align = True, "internal", 64
        return known

    def spread(self, value: Value) -> Value:
        """A number in all lanes."""
        kind = ir.VectorType(value.type, LANES)
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.build.shuffle_vector(first, first, ir.Constant(SHORTS, [0] * LANES))

    def lanes(self, first: Value) -> Value:
        """first, first + 1, ... first + 7."""
        return self.add(self.spread(first), ir.Constant(INTS, list(range(LANES))))

    # Integers.

    def add(self, a: Value, b: Value) -> Value:
        """a + b, and so on; an integer wraps around."""
        return self.build.add(a, self._like(a, b))

    def sub(self, a: Value, b: Value) -> Value:
        """a - b."""
        return self.build.sub(a, self._like(a, b))

    def mul(self, a: Value, b: Value) -> Value:
        """a x b."""
        return self.build.mul(a, self._like(a, b))

    def div(self, a: Value, b: int) -> Value:
        """a / b, not negative."""
        return self.build.udiv(a, self._like(a, b))

    def both(self, a: Value, b: Value) -> Value:
        """a & b."""
        return self.build.and_(a, self._like(a, b))

    def either(self, a: Value, b: Value) -> Value:
        """a | b."""
        return self.build.or_(a, self._like(a, b))

    def xor(self, a: Value, b: Value) -> Value:
        """a ^ b."""
        return self.build.xor(a, self._like(a, b))

    def up(self, a: Value, bits: Value) -> Value:
        """a << bits."""
        return self.build.shl(a, self._like(a, bits))

    def down(self, a: Value, bits: Value) -> Value:
        """a >> bits, filled with zeros."""
        return self.build.lshr(a, self._like(a, bits))

    def sign_down(self, a: Value, bits: int) -> Value:
        """a >> bits, filled with the sign."""
        return self.build.ashr(a, self._like(a, bits))

    def whole(self, sign: str, a: Value, b: Value) -> Value:
        """Compare integers, not negative ones."""
        return self.build.icmp_unsigned(sign, a, self._like(a, b))

    # Floating point: each operation is rounded by itself, none are fused.

    def plus(self, a: Value, b: Value) -> Value:
        """a + b."""
        return self.build.fadd(a, self._like(a, b))

    def minus(self, a: Value, b: Value) -> Value:
        """a - b."""
        return self.build.fsub(a, self._like(a, b))

    def times(self, a: Value, b: Value) -> Value:
        """a x b."""
        return self.build.fmul(a, self._like(a, b))

    def over(self, a: Value, b: Value) -> Value:
        """a / b."""
        return self.build.fdiv(a, self._like(a, b))

    def number(self, sign: str, a: Value, b: Value) -> Value:
        """Compare; false beside a NaN."""
        return self.build.fcmp_ordered(sign, a, self._like(a, b))

    def greater(self, a: Value, b: Value) -> Value:
        """The greater of two; b where a is NaN."""
        return self.pick(self.number(">", a, b), a, self._like(a, b))

    def pick(self, where: Value, yes: Value, no: Value) -> Value:
        """`yes` where the condition holds."""
        return self.build.select(where, yes, no)

    def double(self, value: Value) -> Value:
        """float32 as float64."""
        return self.build.fpext(value, DOUBLES if isinstance(value.type, ir.VectorType) else F64)

    def as_double(self, value: Value) -> Value:
        """int64 as float64."""
        return self.build.sitofp(value, DOUBLES if isinstance(value.type, ir.VectorType) else F64)

    # Memory.

    def at(self, base: Value, index: Value, kind: Value = I64) -> Value:
        """The address of number `index` of a row of one kind."""
        return self.build.gep(base, [index if hasattr(index, "type") else I64(index)], source_etype=kind)

    def load(self, base: Value, index: Value, kind: Value = I64, number: Value | None = None) -> Value:
        """Number `index`, or as a vector those from it on; `number` is a vector's single one."""
        single = number or kind
        value = self.build.load(self.at(base, index, single), typ=kind)
        value.align = BYTES[single]
        return value

    def store(self, value: Value, base: Value, index: Value, number: Value | None = None) -> None:
        """Write one number or a vector."""
        single = number or value.type
        self.build.store(value, self.at(base, index, single)).align = BYTES[single]

    def some(self, row: Value, index: Value, size: Value) -> Value:
        """Eight float32 from `index` on; -inf from `size` on."""
        inside = self.whole("<", self.lanes(index), self.spread(size))
        load = self.intrinsic("llvm.masked.load.v8f32.p0", FLOATS, [POINTER, I32, BITS, FLOATS])
        nothing = self.constant(FLOATS, float("-inf"))
        return self.build.call(load, [self.at(row, index, F32), I32(4), inside, nothing])

    def gather(self, base: Value, index: Value) -> Value:
        """Eight int64 of a table."""
        gather = self.intrinsic("llvm.masked.gather.v8i64.v8p0", INTS, [PLACES, I32, BITS, INTS])
        places = self.build.gep(base, [index], source_etype=I64)
        places.type = PLACES
        nothing = self.constant(INTS, 0)
        return self.build.call(gather, [places, I32(8), self.constant(BITS, 1), nothing])

    def compressed(self, values: Value, where: Value) -> Value:
        """The lanes of eight int64 whose bit is set, moved to the front; the others hold anything."""
        compress = self.intrinsic("llvm.experimental.vector.compress.v8i64", INTS, [INTS, BITS, INTS])
        return self.build.call(compress, [values, where, ir.Constant(INTS, ir.Undefined)])

    def intrinsic(self, name: str, result: Value, arguments: Sequence[Value]) -> Value:
        """A function that LLVM knows."""
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    # Order of events.

    def variable(self, value: Value) -> Variable:
        """A place that holds a value."""
        return Variable(self, value)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """What follows happens where the condition holds."""
        with self.build.if_then(condition):
            yield

    def choice(self, condition: Value) -> Any:
        """Two branches, as two context managers."""
        return self.build.if_else(condition)

    @contextmanager
    def loop(self, goes_on: Callable[[], Value]) -> Iterator[None]:
        """Repeat while `goes_on` says so."""
        head, body, done = (self.build.append_basic_block(name) for name in ("head", "body", "done"))
        self.build.branch(head)
        self.build.position_at_end(head)
        self.build.cbranch(goes_on(), body, done)
        self.build.position_at_end(body)
        yield
        self.build.branch(head)
        self.build.position_at_end(done)

    @contextmanager
    def each(self, end: Value, step: int = 1, start: Value | None = None) -> Iterator[Value]:
        """An index from `start` (0) up to `end`."""
        index = self.variable(I64(0) if start is None else start)
        with self.loop(lambda: self.whole("<", index.value, end)):
            here = index.value
            yield here
            index.set(self.add(here, step))

    @contextmanager
    def each_lane(self, where: Value) -> Iterator[Value]:
        """The lanes whose bit is set, in order."""
        bits = self.variable(self.build.zext(self.build.bitcast(where, I8), I32))
        count = self.intrinsic("llvm.cttz.i32", I32, [I32, I1])
        with self.loop(lambda: self.whole("!=", bits.value, 0)):
            now = bits.value
            yield self.build.zext(self.build.call(count, [now, I1(1)]), I64)
            bits.set(self.both(now, self.sub(now, 1)))

    def any(self, where: Value) -> Value:
        """True when a bit is set."""
        return self.whole("!=", self.build.bitcast(where, I8), 0)

    def sum(self, numbers: Value) -> Value:
        """The sum of eight int64."""
        add = self.intrinsic("llvm.vector.reduce.add.v8i64", I64, [INTS])
        return self.build.call(add, [numbers])

    def _like(self, a: Value, b: Value) -> Value:
        return b if hasattr(b, "type") else self.constant(a.type, b)


PLACES = ir.VectorType(POINTER, LANES)


class Variable:
    """A number or a vector that changes."""

    def __init__(self, emit: Emitter, value: Value) -> None:
        self._build = emit.build
        with emit.build.goto_entry_block():
            self._place = emit.build.alloca(value.type)
        self._kind = value.type
        self.set(value)

    @property
    def value(self) -> Value:
        """What it holds now."""
        return self._build.load(self._place, typ=self._kind)

    def set(self, value: Value) -> None:
        """Hold another."""
        self._build.store(value, self._place)


def function(
    module: Value, name: str, result: Value, *arguments: Value, exported: bool = False
) -> tuple[Emitter, list[Value]]:
    """A new function's body and its arguments."""
    made = ir.Function(module, ir.FunctionType(result, arguments), name)
    if not exported:
        made.linkage = "internal"
    return Emitter(made), list(made.args)
