"""`Y = X W^T + b` for weights W with codes of 8 or 4 bits, by the matrix instructions for 16-bit numbers.

A code minus its zero is an integer of up to 256, or a code is a number of type e4m3. Any 16-bit dtype holds
either exactly, so each product with it is exact. Sums of products are multiplied by the scale, in float32.
Decoded numbers of a weight are never written to memory.

A program adds up all of K for one tile of the result, plane after plane (see
`outrider.engine.quantization.planes`). Each plane is a product of its own that is then scaled. So the order
of a sum depends neither on the tile nor on how many rows there are. Words are read once for all rows of a
tile.

Shapes: M rows, N columns (the weight's rows), K numbers of a row, B blocks, G groups.
"""

import triton
import triton.language as tl

PLANE = tl.constexpr(32)
LARGE = tl.constexpr(8388608.0)
"""2^23. Float32 numbers from 2^23 to 2^24 are the integers, so a code that is put into the lowest bits of
this one's digits is added to it. That takes less time than a conversion."""
LARGE_BITS = tl.constexpr(0x4B000000)


E4M3_DIGITS = tl.constexpr(-0x78100000)
"""The bits of float32 that e4m3 numbers fill: the sign, the lower 4 bits of the exponent, 3 of the
fraction."""
E4M3_FACTOR = tl.constexpr(2.0**120)
"""Exponents of float32 count from 127, those of e4m3 from 7. Denormal numbers stay correct: both formats
treat them alike."""


@triton.jit
def _weights(words, place: tl.constexpr, offset, BITS: tl.constexpr, E4M3: tl.constexpr, dtype: tl.constexpr):
    """Return the codes at a place of words [PLANE, n] minus their zeros (`offset` [n] - LARGE); or e4m3
    numbers."""
    if E4M3:
        digits = ((words << (24 - BITS * place)) >> 4) & E4M3_DIGITS  # shifted with its sign
        numbers = digits.to(tl.float32, bitcast=True) * E4M3_FACTOR
    else:
        codes = (words >> (BITS * place)) & ((1 << BITS) - 1)
        numbers = (codes | LARGE_BITS).to(tl.float32, bitcast=True) - offset[None, :]
    return numbers.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def coded_product_kernel(
    x,  # [M, K] by row stride
    words,  # [B PLANE, N] int32 by row stride
    scales,  # [G, N] by row stride
    zeros,  # like scales, or anything when ZEROS is false
    bias,  # [N], or anything when BIAS is false
    out,  # [M, N], or [parts, M, N] float32 where there are several parts
    rows,
    columns,
    numbers,
    x_stride,
    words_stride,
    scales_stride,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    E4M3: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one tile of the result, or of one part of its sums (grid [tiles of rows, tiles of columns,
    parts]). Tiles of the same columns run together and share what they read. WHOLE: no block is padded.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = column < columns
    PLACES: tl.constexpr = 32 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    offset = tl.full([BLOCK_N], LARGE + (1 << (BITS - 1)), tl.float32)
    along = tl.arange(0, PLANE)
    blocks = tl.cdiv(numbers, PLANE * PLACES)
    each = tl.cdiv(blocks, tl.num_programs(2))
    first_block = tl.program_id(2) * each
    # Stages that are named here hold the scales too; without that each block would wait for them.
    for block in tl.range(first_block, tl.minimum(first_block + each, blocks), num_stages=STAGES):
        places = words + (along + block * PLANE)[:, None] * words_stride + column[None, :]
        held = tl.load(places, mask=real[None, :], other=0)
        for place in tl.static_range(PLACES):
            first = (block * PLACES + place) * PLANE
            # Past the last number x is 0, so any group will do.
            group = (first if WHOLE else tl.minimum(first, numbers - 1)) // GROUP
            at = group * scales_stride + column
            if ZEROS:
                offset = LARGE + tl.load(zeros + at, mask=real, other=0.0).to(tl.float32)
            part = tl.load(
                x + row[:, None] * x_stride + (along + first)[None, :],
                mask=(row < rows)[:, None] & (WHOLE | (along + first < numbers)[None, :]),
                other=0.0,
            )
            weights = _weights(held, place, offset, BITS, E4M3, dtype)
            product = tl.dot(part, weights, input_precision=PRECISION)
            # Fused explicitly: a compiler might otherwise choose differently for different tiles.
            sums = tl.fma(product, tl.load(scales + at, mask=real, other=0.0).to(tl.float32)[None, :], sums)
    sums = _with_bias(sums, bias, column, real, BIAS)
    target = out + (tl.program_id(2).to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows"])
def sum_parts_kernel(
    parts,  # [PARTS, M, N] float32
    bias,  # [N], or anything when BIAS is false
    out,  # [M, N]
    rows,
    columns,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the parts of sums from first to last (grid [M, blocks of N])."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    sums = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + (part * rows + row) * columns + column, mask=real, other=0.0)
    sums = tl.reshape(_with_bias(tl.reshape(sums, [1, BLOCK]), bias, column, real, BIAS), [BLOCK])
    tl.store(out + row * columns + column, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _with_bias(sums, bias, column, real, BIAS: tl.constexpr):
    """Return sums [m, n] plus the bias of their columns [n]."""
    if BIAS:
        sums += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    return sums
