"""What all kernels' LLVM IR shares: vectors of LANES numbers, read, rounded and written under a mask.

Arithmetic is in float32, in vectors `SUM`. Lines are generated for inlining; what starts with % names values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LANES = 16
"""Numbers in a 512-bit vector of float32."""
STEP_BYTES = 4
"""Of a row, what one multiply-add of a product takes."""
SUM = f"<{LANES} x float>"
MASK = f"<{LANES} x i1>"


@dataclass(frozen=True, slots=True)
class Numbers:
    """One kind of number: how it is multiplied, added and written."""

    name: str
    bytes: int
    llvm: str
    suffix: str
    """Of the names of masked reads and writes."""
    multiply_add: str
    declaration: str

    @property
    def row(self) -> str:
        """LLVM type of LANES numbers."""
        return f"<{LANES} x {self.llvm}>"

    @property
    def weights(self) -> str:
        """LLVM type of one step of LANES columns."""
        return f"<{LANES * STEP_BYTES // self.bytes} x {self.llvm}>"


BFLOAT16 = Numbers(
    "bfloat16",
    2,
    "bfloat",
    "v16bf16",
    "call {sum} @llvm.x86.avx512bf16.dpbf16ps.512({sum} {a}, {weights} {w}, {weights} {x})",
    "declare {sum} @llvm.x86.avx512bf16.dpbf16ps.512({sum}, {weights}, {weights})",
)
FLOAT32 = Numbers(
    "float32",
    4,
    "float",
    "v16f32",
    "call {sum} @llvm.fma.v16f32({sum} {w}, {sum} {x}, {sum} {a})",
    "declare {sum} @llvm.fma.v16f32({sum}, {sum}, {sum})",
)


def declarations(numbers: Numbers) -> str:
    """Of what the lines call."""
    reads = {kind.suffix: kind.row for kind in (numbers, FLOAT32)}
    return "\n".join(
        [
            FLOAT32.declaration.format(sum=SUM),
            *(f"declare {row} @llvm.masked.load.{s}.p0(ptr, i32, {MASK}, {row})" for s, row in reads.items()),
            f"declare void @llvm.masked.store.{numbers.suffix}.p0({numbers.row}, ptr, i32, {MASK})",
        ]
    )


def masked(left: str, name: str = "%mask") -> Iterator[str]:
    """The lanes there are with `left` columns left."""
    lanes = f"<{LANES} x i64>"
    order = ", ".join(f"i64 {lane}" for lane in range(LANES))
    yield f"  {name}_one = insertelement {lanes} poison, i64 {left}, i32 0"
    yield f"  {name}_all = shufflevector {lanes} {name}_one, {lanes} poison, <{LANES} x i32> zeroinitializer"
    yield f"  {name} = icmp ugt {lanes} {name}_all, <{order}>"


def read(numbers: Numbers, name: str, at: str, mask: str = "%mask") -> Iterator[str]:
    """Make {name} of the numbers at {at}; lanes beyond the mask are 0."""
    result = name if numbers is FLOAT32 else f"{name}_number"
    yield (
        f"  {result} = call {numbers.row} @llvm.masked.load.{numbers.suffix}.p0(ptr {at},"
        f" i32 {numbers.bytes}, {MASK} {mask}, {numbers.row} zeroinitializer)"
    )
    if numbers is not FLOAT32:
        yield f"  {name} = fpext {numbers.row} {result} to {SUM}"


def rounded(numbers: Numbers, name: str, exact: str) -> Iterator[str]:
    """Make {name} of {exact} as a number would hold it."""
    if numbers is FLOAT32:
        yield f"  {name} = bitcast {SUM} {exact} to {SUM}"
        return
    yield f"  {name}_rounded = fptrunc {SUM} {exact} to {numbers.row}"
    yield f"  {name} = fpext {numbers.row} {name}_rounded to {SUM}"


def write(numbers: Numbers, value: str, at: str, mask: str = "%mask") -> Iterator[str]:
    """Write a vector as numbers."""
    cast = "bitcast" if numbers is FLOAT32 else "fptrunc"
    yield f"  {value}_written = {cast} {SUM} {value} to {numbers.row}"
    yield (
        f"  call void @llvm.masked.store.{numbers.suffix}.p0({numbers.row} {value}_written, ptr {at},"
        f" i32 {numbers.bytes}, {MASK} {mask})"
    )


def multiply_add(result: str, a: str, b: str, c: str) -> str:
    """The line that makes {result} = a b + c, rounded once."""
    return f"  {result} = call {SUM} @llvm.fma.v16f32({SUM} {a}, {SUM} {b}, {SUM} {c})"


def splat(value: float) -> str:
    """A constant vector; the number is rounded to float32."""
    exact = struct.unpack("f", struct.pack("f", value))[0]
    return f"splat (float 0x{struct.pack('>d', exact).hex()})"


def filled(template: str, places: Mapping[str, str]) -> str:
    """The template with each place's name replaced by its text."""
    return re.sub("|".join(places), lambda found: places[found[0]], template)
