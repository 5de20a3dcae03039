"""What a decoder layer does between its products, each as one launch.

    add_norm_kernel    residual add, and RMS norm (Zhang and Sennrich 2019) or layer norm (Ba et al. 2016)
    rotation_kernel    norms of heads, rotary positions (Su et al. 2021), keys and values to their slots
    activation_kernel  activation of an MLP, with a gate (Shazeer 2020) or without one

They compute what transformers computes, with the same roundings to 16 bits.

Shapes: N tokens, C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, S slots.
"""

import triton
import triton.language as tl

from outrider.engine.gpu.kernels.eight_bits import as_stored
from outrider.engine.gpu.kernels.overlap import let_next_begin, wait_for_earlier


@triton.jit
def weighted(row, factor, dtype: tl.constexpr):
    """Return a float32 row times its weight. It is rounded before as in Llama; if the weight is float32,
    after as in Gemma."""
    weighted = row * factor if factor.dtype == tl.float32 else row.to(dtype) * factor
    return weighted.to(dtype)


@triton.jit
def add_norm_kernel(
    hidden,  # [N, C] by row stride, written when ADD
    added,  # [N, C]
    weight,  # [C]
    bias,  # [C], or anything when BIAS is false
    out,  # [N, C] by the same stride, perhaps `hidden`
    stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add to the hidden rows (grid [N]) and normalise them: RMS norm, or layer norm when CENTRED."""
    let_next_begin(OVERLAP)
    wait_for_earlier(OVERLAP)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    token = tl.program_id(0).to(tl.int64)
    places = token * stride + columns
    held = tl.load(hidden + places, mask=inside, other=0.0)
    if ADD:
        held += tl.load(added + token * WIDTH + columns, mask=inside, other=0.0)
        tl.store(hidden + places, held, mask=inside)
    row = held.to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0)
    if CENTRED:
        row = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0.0)
        factor = factor.to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    if BIAS:
        row = row * factor + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        normed = row.to(held.dtype)
    else:
        normed = weighted(row, factor, held.dtype)
    tl.store(out + places, normed, mask=inside)


@triton.jit
def _rotated(places, cos, sin, weight, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return both halves of one head, rotated: column i with column i + D / 2."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    left = tl.load(places + columns, mask=inside, other=0.0)
    right = tl.load(places + HALF + columns, mask=inside, other=0.0)
    if NORM:
        x = left.to(tl.float32)
        y = right.to(tl.float32)
        scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
        factor = tl.load(weight + columns, mask=inside, other=0.0)
        left = weighted(x * scale, factor, left.dtype)
        factor = tl.load(weight + HALF + columns, mask=inside, other=0.0)
        right = weighted(y * scale, factor, right.dtype)
    x = left.to(tl.float32)
    y = right.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _normed(held, weight, eps, inside, columns, WIDTH: tl.constexpr):
    """Return the RMS norm of a row of WIDTH columns."""
    row = tl.where(inside, held.to(tl.float32), 0.0)
    row *= tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    return weighted(row, tl.load(weight + columns, mask=inside, other=0.0), held.dtype)


@triton.jit
def rotation_kernel(
    qkv,  # [N, Q + 2 H, D]; queries are rotated in place
    keys,  # [S, H, D]
    values,  # [S, H, D]
    cos,  # [N, HALF] float32
    sin,
    weights,  # [Q + H, D] of the head norms, or anything when NORM is false
    value_weight,  # [D] of the norm of values, or anything when VALUE_NORM is false
    buffer,
    slots_at,
    eps,
    value_eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rotate one head of one token (grid [N, Q + 2 H]). Queries stay in place, keys and values go to their
    slot.

    The first 2 HALF of WIDTH columns are rotated, and all columns where there is a norm of heads. H is 0
    where the layer sees keys and values of another layer.
    """
    let_next_begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = qkv + (token * (QUERY_HEADS + 2 * KV_HEADS) + head) * WIDTH
    slot = tl.load(buffer + slots_at + token) * KV_HEADS
    wait_for_earlier(OVERLAP)
    target = keys + (slot + head - QUERY_HEADS) * WIDTH
    if head >= QUERY_HEADS + KV_HEADS:
        target = values + (slot + head - QUERY_HEADS - KV_HEADS) * WIDTH
    if head < QUERY_HEADS + KV_HEADS:
        pairs = tl.arange(0, BLOCK_HALF)
        turning, angle = pairs < HALF, token * HALF + pairs
        c = tl.load(cos + angle, mask=turning, other=0.0)
        s = tl.load(sin + angle, mask=turning, other=0.0)
        left, right = _rotated(source, c, s, weights + head * WIDTH, eps, HALF, BLOCK_HALF, NORM)
        left = left.to(qkv.dtype.element_ty)
        right = right.to(qkv.dtype.element_ty)
        if head < QUERY_HEADS:
            tl.store(source + pairs, left, mask=turning)
            tl.store(source + HALF + pairs, right, mask=turning)
        else:
            tl.store(target + pairs, as_stored(left, keys), mask=turning)
            tl.store(target + HALF + pairs, as_stored(right, keys), mask=turning)
    if head >= QUERY_HEADS:
        columns = tl.arange(0, BLOCK)
        copied = (columns < WIDTH) & ((columns >= 2 * HALF) | (head >= QUERY_HEADS + KV_HEADS))
        held = tl.load(source + columns, mask=copied)
        if VALUE_NORM:
            normed = _normed(held, value_weight, value_eps, copied, columns, WIDTH)
            held = tl.where(head >= QUERY_HEADS + KV_HEADS, normed, held)
        tl.store(target + columns, as_stored(held, keys), mask=copied)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The activation of float32 numbers; tanh by the exponential, which saturates correctly."""
    if KIND == "silu":
        result = x / (1 + tl.exp(-x))
    elif KIND == "gelu":
        result = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    elif KIND == "gelu_tanh":
        result = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu_squared")
        result = tl.where(x < 0, 0.0, x)
        if KIND == "relu_squared":
            result *= result
    return result


@triton.jit
def activation_kernel(
    x,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Activate x [N, F], or the first half of x [N, 2 F] times the second half -> out [N, F].

    The grid is [N, blocks]; `out` may be x where there is no gate.
    """
    let_next_begin(OVERLAP)
    wait_for_earlier(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    source = x + token * (2 * WIDTH if GATED else WIDTH)
    number = tl.load(source + columns, mask=inside, other=0.0)
    result = activated(number.to(tl.float32), KIND).to(number.dtype)
    if GATED:
        result *= tl.load(source + WIDTH + columns, mask=inside, other=0.0)
    tl.store(out + token * WIDTH + columns, result, mask=inside)
