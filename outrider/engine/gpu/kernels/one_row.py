"""The product of a linear layer and one row, with the norm before it and what follows it, in one launch.

Such a product takes as long as reading the weight does. So this multiplies without matrix instructions, which
take 8 rows or more and pass the weight through shared memory: a number goes from memory to a register, and is
multiplied there.

Each program computes the norm's factor of the row for itself, so no launch waits for a norm. Numbers are
rounded where other forwards round them, which leaves only the order of sums to differ.

Shapes: IN and OUT numbers of a row before and after.
"""

import triton
import triton.language as tl

from outrider.engine.gpu.kernels.layers import activated, weighted
from outrider.engine.gpu.kernels.overlap import let_next_begin, wait_for_earlier


@triton.jit
def _numbers_of(places, row, number, IN: tl.constexpr, WHOLE: tl.constexpr):
    """Load a block [n, k] of a weight; `row` [n] are its rows, `number` [k] its columns, zero from IN on."""
    at = row[:, None] * IN + number[None, :]
    return tl.load(places + at, mask=(WHOLE | (number < IN))[None, :], other=0.0).to(tl.float32)


@triton.jit
def _finished(sums, bias, column, dtype: tl.constexpr, OUT: tl.constexpr, BIAS: tl.constexpr):
    """Return the product [n] of its parts [n, k], with the bias, rounded."""
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)
    return result.to(dtype)


@triton.jit
def _norm_factor(x, eps, IN: tl.constexpr, BLOCK: tl.constexpr):
    """Return 1 / rms of a row."""
    number = tl.arange(0, BLOCK)
    row = tl.load(x + number, mask=number < IN, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(row * row, 0) / IN + eps)


@triton.jit
def one_row_kernel(
    x,  # [IN]
    factors,  # [IN] the norm's weights, or anything when NORM is false
    weight,  # [OUT, IN], or [2 OUT, IN] when GATE is not empty: gate, then up
    bias,  # as many numbers as the weight has rows, or anything when BIAS is false
    out,  # [OUT]
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute some columns of the result (grid [OUT in blocks]).

    GATE is the activation of a gated MLP's first half, or empty. ADD: the result is added to `out`. BLOCK_IN
    is the power of two that IN fits in.
    """
    let_next_begin(OVERLAP)
    wait_for_earlier(OVERLAP)
    WHOLE: tl.constexpr = IN % BLOCK_K == 0
    dtype: tl.constexpr = out.dtype.element_ty
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (column if OUT % BLOCK_N == 0 else tl.minimum(column, OUT - 1)).to(tl.int64)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    scale = _norm_factor(x, eps, IN, BLOCK_IN) if NORM else 1.0
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        number = start + tl.arange(0, BLOCK_K)
        there = WHOLE | (number < IN)
        a = tl.load(x + number, mask=there, other=0.0)
        if NORM:
            factor = tl.load(factors + number, mask=there, other=0.0)
            a = weighted(a.to(tl.float32) * scale, factor, a.dtype)
        a = a.to(tl.float32)
        sums += _numbers_of(weight, row, number, IN, WHOLE) * a[None, :]
        if GATE != "":
            ups += _numbers_of(weight + OUT * IN, row, number, IN, WHOLE) * a[None, :]
    result = _finished(sums, bias, column, dtype, OUT, BIAS)
    if GATE != "":
        result = activated(result.to(tl.float32), GATE).to(dtype)
        result *= _finished(ups, bias + OUT, column, dtype, OUT, BIAS)
    if ADD:
        result += tl.load(out + column, mask=column < OUT, other=0.0)
    tl.store(out + column, result, mask=column < OUT)
