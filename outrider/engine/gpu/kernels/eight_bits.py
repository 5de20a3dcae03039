"""Keys and values in memory: as they are, or as bytes with 4 bits of exponent and 3 of mantissa (e4m3).

Bytes are encoded and decoded by operations on bits: devices of compute capability 8.0 have no instruction for
this, and one way for all devices makes the same bytes on all. They are those of torch's `float8_e4m3fn`,
which has no infinities; numbers above 448 and NaN become 448.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_NORMAL = tl.constexpr(2.0**-6)
EXPONENTS_APART = tl.constexpr((127 - 7) << 3)
"""The difference of the exponents' biases of float32 and e4m3, above a mantissa of 3 bits."""
STEPS_OF_2_TO_MINUS_9 = tl.constexpr(2.0**14)
"""From this number on float32 numbers are 2^-9 apart, as e4m3's smallest numbers are."""


@triton.jit
def _code(x):
    """Encode numbers as bytes, to nearest, ties to even."""
    exact = x.to(tl.float32)
    size = tl.abs(exact)
    size = tl.where(size < LARGEST, size, LARGEST)  # not a minimum, which would keep NaN
    bits = size.to(tl.int32, bitcast=True)
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - EXPONENTS_APART
    shifted = (size + STEPS_OF_2_TO_MINUS_9).to(tl.int32, bitcast=True)
    code = tl.where(size < SMALLEST_NORMAL, shifted & 0xF, code)
    sign = (exact.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def as_stored(x, memory):
    """Return x as `memory` (a pointer) stores it."""
    if memory.dtype.element_ty == tl.uint8:
        x = _code(x)
    return x.to(memory.dtype.element_ty)


@triton.jit
def as_read(stored, dtype: tl.constexpr):
    """Return the stored numbers [...] in `dtype`. 16 bits hold the numbers of bytes exactly."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        # The bits are put into a float16, whose exponents count from 15 instead of 7.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        stored = (half * 256.0).to(dtype)
    return stored
