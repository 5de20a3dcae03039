"""The product of a linear layer, with sums that do not depend on how many rows there are.

A library chooses its kernel by the number of rows. Here every row is in a tile of BLOCK_M rows, padded with
zeros, and the tile's shape and the order over IN depend only on the weight. So a row goes through the same
instructions alone and in any batch.

Shapes: M rows, IN and OUT numbers of a row before and after.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,  # [M, IN]
    weight,  # [OUT, IN]
    bias,  # [OUT], or anything when BIAS is false
    out,  # [M, OUT]
    rows,  # M
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute x times the weight's transpose plus the bias in float32, rounded once (grid [M, OUT] in
    blocks). Neighbouring programs share their part of the weight.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = row < rows
    inside = column < OUT
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN, BLOCK_K):
        numbers = start + tl.arange(0, BLOCK_K)
        there = numbers < IN
        a = tl.load(x + row[:, None] * IN + numbers[None, :], mask=real[:, None] & there[None, :], other=0.0)
        b = tl.load(
            weight + column[None, :] * IN + numbers[:, None],
            mask=inside[None, :] & there[:, None],
            other=0.0,
        )
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * OUT + column[None, :],
        sums.to(out.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )
