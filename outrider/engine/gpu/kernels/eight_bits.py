"""Keys and values in memory: as they are, or as bytes with 4 bits of exponent and 3 of mantissa (e4m3).

Bytes are made and read by operations on bits: devices of compute capability 8.0 have no instruction for them,
and one way for all gives the same bytes on all. They are those of torch's `float8_e4m3fn`, which has no
infinities; what is larger than 448, or NaN, becomes 448.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_NORMAL = tl.constexpr(2.0**-6)
EXPONENTS_APART = tl.constexpr((127 - 7) << 3)
"""Of float32 and e4m3, where the mantissa has 3 bits."""
STEPS_OF_2_TO_MINUS_9 = tl.constexpr(2.0**14)
"""float32 numbers from here on are so far apart, as e4m3's smallest are."""


@triton.jit
def _code(x):
    """Bytes of numbers, to nearest, ties to even."""
    exact = x.to(tl.float32)
    size = tl.abs(exact)
    size = tl.where(size < LARGEST, size, LARGEST)  # no minimum: NaN would stay
    bits = size.to(tl.int32, bitcast=True)
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - EXPONENTS_APART
    shifted = (size + STEPS_OF_2_TO_MINUS_9).to(tl.int32, bitcast=True)
    code = tl.where(size < SMALLEST_NORMAL, shifted & 0xF, code)
    sign = (exact.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def as_stored(x, memory):
    """What `memory` (a pointer) holds of x."""
    if memory.dtype.element_ty == tl.uint8:
        x = _code(x)
    return x.to(memory.dtype.element_ty)


@triton.jit
def as_read(stored, dtype: tl.constexpr):
    """The numbers [...] of what memory holds, in `dtype`: 16 bits hold those of bytes exactly."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        # At their places in a float16, whose exponents begin 8 lower.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        stored = (half * 256.0).to(dtype)
    return stored
