"""What a decoder layer does between its products, each as one launch.

    add_norm_kernel   residual add and RMS norm (Zhang and Sennrich 2019)
    rotation_kernel   head norms, rotary positions (Su et al. 2021), keys and values to their slots
    gate_kernel       SiLU gate (Shazeer 2020)

They compute what transformers computes, with the same roundings to 16 bits.

Shapes: N tokens, C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, S slots.
"""

import triton
import triton.language as tl

from outrider.engine.gpu.kernels.eight_bits import as_stored


@triton.jit
def _weighted(row, factor, dtype: tl.constexpr):
    """A float32 row times its weight. Rounded before as Llama's; with a float32 weight behind, as Gemma's."""
    if factor.dtype == tl.float32:
        return (row * factor).to(dtype)
    return row.to(dtype) * factor


@triton.jit
def _normed(row, columns, weight, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """A row [BLOCK] float32, 0 behind WIDTH, scaled to a root mean square of 1 and by its weight."""
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    return _weighted(row * scale, factor, dtype)


@triton.jit
def add_norm_kernel(
    hidden,  # [N, C], written when ADD
    added,  # [N, C]
    weight,  # [C]
    out,  # [N, C]
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Add to the hidden rows (grid [N]) and normalise them."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(hidden + places, mask=inside, other=0.0)
    if ADD:
        row += tl.load(added + places, mask=inside, other=0.0)
        tl.store(hidden + places, row, mask=inside)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + places, _normed(row.to(tl.float32), columns, weight, eps, WIDTH, dtype), mask=inside)


@triton.jit
def _rotated(places, cos, sin, weight, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Both halves of one head, rotated: column i with column i + D / 2."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    left = tl.load(places + columns, mask=inside, other=0.0)
    right = tl.load(places + HALF + columns, mask=inside, other=0.0)
    if NORM:
        x = left.to(tl.float32)
        y = right.to(tl.float32)
        scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
        factor = tl.load(weight + columns, mask=inside, other=0.0)
        left = _weighted(x * scale, factor, left.dtype)
        factor = tl.load(weight + HALF + columns, mask=inside, other=0.0)
        right = _weighted(y * scale, factor, right.dtype)
    x = left.to(tl.float32)
    y = right.to(tl.float32)
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def rotation_kernel(
    qkv,  # [N, Q + 2 H, D]; queries are rotated in place
    keys,  # [S, H, D]
    values,  # [S, H, D]
    cos,  # [N, D / 2] float32
    sin,
    weights,  # [Q + H, D] of the head norms, or anything when NORM is false
    buffer,
    slots_at,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One head of one token (grid [N, Q + 2 H]): queries stay, keys and values go to their slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    source = qkv + (token * (QUERY_HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    slot = tl.load(buffer + slots_at + token) * KV_HEADS
    if head < QUERY_HEADS + KV_HEADS:
        angle = token * HALF + columns
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        left, right = _rotated(source, c, s, weights + head * (2 * HALF), eps, HALF, BLOCK, NORM)
        left = left.to(qkv.dtype.element_ty)
        right = right.to(qkv.dtype.element_ty)
        if head < QUERY_HEADS:
            tl.store(source + columns, left, mask=inside)
            tl.store(source + HALF + columns, right, mask=inside)
        else:
            target = keys + (slot + head - QUERY_HEADS) * (2 * HALF)
            tl.store(target + columns, as_stored(left, keys), mask=inside)
            tl.store(target + HALF + columns, as_stored(right, keys), mask=inside)
    else:
        target = values + (slot + head - QUERY_HEADS - KV_HEADS) * (2 * HALF)
        left = tl.load(source + columns, mask=inside)
        right = tl.load(source + HALF + columns, mask=inside)
        tl.store(target + columns, as_stored(left, values), mask=inside)
        tl.store(target + HALF + columns, as_stored(right, values), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """SiLU of the gate times up: gate_up [N, 2 F] -> out [N, F] (grid [N, blocks])."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + token * (2 * WIDTH) + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + columns, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    opened = (exact / (1 + tl.exp(-exact))).to(gate.dtype)
    tl.store(out + token * WIDTH + columns, opened * up, mask=inside)
