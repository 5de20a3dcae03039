"""Products of the experts that tokens have chosen, with sums that do not depend on the other tokens.

    choose_kernel            which experts a token goes through
    arrange_kernel           which pairs of a token and an expert each expert has
    expert_product_kernel    a linear layer of the pairs' experts
    bounded_gate_kernel      the gate of gpt-oss
    expert_sum_kernel        the weighted sum of the results of a token's experts

The host knows only how many pairs there are: programs find their expert, and its rows, on the device. So a
forward with experts waits for nothing and can be captured. Each expert's weight is read once for up to a tile
of rows, and that of an expert that no token has chosen is not read.

Shapes: M tokens, K experts per token, S = M K pairs, pair i belonging to token i / K, E experts.
"""

import triton
import triton.language as tl


@triton.jit
def choose_kernel(
    scores,  # [M, E]
    chosen,  # [M, K] int64
    shares,  # [M, K] float32
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Find the CHOSEN highest scores of a token (grid [M]) in descending order, and the softmax of these or
    of all."""
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    real = expert < EXPERTS
    left = tl.load(scores + token * EXPERTS + expert, mask=real, other=float("-inf")).to(tl.float32)
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    best = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for rank in tl.static_range(CHOSEN):
        found = tl.argmax(left, 0)
        best = tl.where(place == rank, found, best)
        weights = tl.where(place == rank, tl.exp(tl.max(left, 0) - highest), weights)
        left = tl.where(expert == found, float("-inf"), left)
    if NORMALISED:
        total = tl.sum(weights, 0)
    target = token * CHOSEN + place
    tl.store(chosen + target, best.to(tl.int64), mask=place < CHOSEN)
    tl.store(shares + target, weights / total, mask=place < CHOSEN)


@triton.jit(do_not_specialize=["pairs"])
def arrange_kernel(
    chosen,  # [S] int64
    order,  # [S] int32: the pairs, by expert
    ends,  # [E] int32: where each expert's pairs end
    pairs,  # S
    BLOCK: tl.constexpr,
):
    """Write the pairs of one expert (grid [E])."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found = tl.load(chosen + pair, mask=pair < pairs, other=expert)
        before += (found < expert).to(tl.int32)
    place = tl.sum(before, 0)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, pair, mask=mine == 1)
        place += tl.sum(mine, 0)
    tl.store(ends + expert, place)


@triton.jit
def expert_product_kernel(
    x,  # [S / SHARING, IN]
    weight,  # [E, OUT, IN] by its strides
    bias,  # [E, OUT], or anything when BIAS is false
    order,  # of arrange_kernel
    ends,
    out,  # [S, OUT]
    expert_stride,
    out_stride,
    in_stride,
    SHARING: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a row of `out` for each pair, from the row of x that SHARING pairs have in common.

    Sums are float32, and rounded once. The grid is [tiles, OUT in blocks]. A tile has up to BLOCK_M pairs of
    one expert; there may be more programs than tiles. Neighbouring programs share their part of an expert's
    weight.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    real = expert < EXPERTS
    end = tl.load(ends + expert, mask=real, other=0)
    begin = tl.load(ends + expert - 1, mask=real & (expert > 0), other=0)
    tiles = tl.where(real, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    until = tl.cumsum(tiles, 0)
    ours = tl.sum((real & (until <= tile)).to(tl.int32), 0)
    if ours < EXPERTS:
        first = begin + (tile - until + tiles) * BLOCK_M
        place = tl.sum(tl.where(expert == ours, first, 0), 0) + tl.arange(0, BLOCK_M)
        there = place < tl.sum(tl.where(expert == ours, end, 0), 0)
        pair = tl.load(order + place, mask=there, other=0).to(tl.int64)
        column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < OUT
        source = x + (pair // SHARING)[:, None] * IN
        numbers_of = weight + ours.to(tl.int64) * expert_stride + column[None, :] * out_stride
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, IN, BLOCK_K):
            number = start + tl.arange(0, BLOCK_K)
            within = number < IN
            a = tl.load(source + number[None, :], mask=there[:, None] & within[None, :], other=0.0)
            b = tl.load(
                numbers_of + number[:, None] * in_stride, mask=inside[None, :] & within[:, None], other=0.0
            )
            sums = tl.dot(a, b, sums, input_precision=PRECISION)
        if BIAS:
            added = tl.load(bias + ours.to(tl.int64) * OUT + column, mask=inside, other=0.0)
            sums += added.to(tl.float32)[None, :]
        tl.store(
            out + pair[:, None] * OUT + column[None, :],
            sums.to(out.dtype.element_ty),
            mask=there[:, None] & inside[None, :],
        )


@triton.jit
def bounded_gate_kernel(
    x, out, WIDTH: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """gate sigmoid(ALPHA gate) (up + 1) of x [S, 2 F], where gate and up alternate, -> out [S, F].

    The grid is [S, blocks].
    """
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = x + pair * 2 * WIDTH + 2 * columns
    gate = tl.minimum(tl.load(source, mask=inside, other=0.0).to(tl.float32), LIMIT)
    up = tl.load(source + 1, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    result = gate / (1 + tl.exp(-ALPHA * gate)) * (up + 1)
    tl.store(out + pair * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expert_sum_kernel(
    results,  # [S, WIDTH]
    shares,  # [S] float32
    out,  # [M, WIDTH]
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the results of a token's CHOSEN pairs times their shares, in their order (grid [M, blocks])."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sums = tl.zeros([BLOCK], tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = token * CHOSEN + chosen
        result = tl.load(results + pair * WIDTH + columns, mask=inside, other=0.0)
        sums += result.to(tl.float32) * tl.load(shares + pair)
    tl.store(out + token * WIDTH + columns, sums.to(out.dtype.element_ty), mask=inside)
