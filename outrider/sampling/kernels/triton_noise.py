"""GPU kernels for the noise of `outrider.sampling.noise` and the weights of `outrider.sampling.truncation`.

They compute with the same integers, and so yield the same bits.

On a GPU, drawing all of a vocabulary's noise is cheaper than searching it. As everywhere, a score is a
rounded product and a rounded sum: launches switch fused multiply-add off.

Importing this module needs Triton; `outrider.engine.gpu.accelerator` tells whether it is there.

Shapes: N rows, V vocabulary, G groups of 64 tokens, C listed tokens of a row.
"""

import triton
import triton.language as tl

from outrider.sampling import noise as plain
from outrider.sampling.truncation import EXPONENT_FLOOR, LOG2_E, POWER

GAMMA = tl.constexpr(plain.signed(plain.GAMMA))
MIX_1 = tl.constexpr(plain.signed(plain.MIX_1))
MIX_2 = tl.constexpr(plain.signed(plain.MIX_2))
LOW_34 = tl.constexpr(2**34 - 1)
LOW_37 = tl.constexpr(2**37 - 1)
LOW_33 = tl.constexpr(2**33 - 1)
LOW_38 = tl.constexpr(2**38 - 1)
LOW_28 = tl.constexpr(2**28 - 1)
LOW_21 = tl.constexpr(2**21 - 1)
LN2_EXPONENTIAL = tl.constexpr(plain.LN2_EXPONENTIAL)
LN2_NOISE = tl.constexpr(plain.LN2_NOISE)
NOISE_UNIT = tl.constexpr(2.0**-plain.NOISE_BITS)
CELLS = tl.constexpr(plain.CELLS)
MIN_EXPONENT = tl.constexpr(EXPONENT_FLOOR)
HALVINGS = tl.constexpr(LOG2_E)
POWER_0 = tl.constexpr(POWER[0])
POWER_1 = tl.constexpr(POWER[1])
POWER_2 = tl.constexpr(POWER[2])
POWER_3 = tl.constexpr(POWER[3])
POWER_4 = tl.constexpr(POWER[4])
POWER_5 = tl.constexpr(POWER[5])
POWER_6 = tl.constexpr(POWER[6])


@triton.jit
def _hash(key, counters):
    """SplitMix64's output number `counter` of the stream that starts at `key`."""
    state = counters * GAMMA + key
    state = state ^ ((state >> 30) & LOW_34)
    state = state * MIX_1
    state = state ^ ((state >> 27) & LOW_37)
    state = state * MIX_2
    return state ^ ((state >> 31) & LOW_33)


@triton.jit
def _float_bits(integers):
    return integers.to(tl.float64).to(tl.int64, bitcast=True)


@triton.jit
def _exponential(hashed, tables):
    """Standard exponential with 58 fraction bits; see `noise._exponential`."""
    half_lives = 1043 - (_float_bits(((hashed >> 5) & LOW_21) | 1) >> 52)
    uniform = (hashed >> 26) & LOW_38
    cell = uniform >> 28
    rest = ((uniform & LOW_28) * tl.load(tables + CELLS + cell)) >> 28
    rest = ((rest + tl.load(tables + cell)) * ((uniform << 1) | 1)) >> 5
    return rest + half_lives * LN2_EXPONENTIAL


@triton.jit
def _minus_log(exponential, tables):
    """-ln as float64, a multiple of 2^-44; see `noise._minus_log`."""
    bits = _float_bits(exponential)
    cell = (bits >> 42) & (CELLS - 1)
    inside = (((bits >> 14) & LOW_28) * tl.load(tables + 3 * CELLS + cell)) >> 16
    inside += tl.load(tables + 2 * CELLS + cell) << 12
    return ((1081 - (bits >> 52)) * LN2_NOISE - inside).to(tl.float64) * NOISE_UNIT


@triton.jit
def _noise(tokens, groups, keys, tables):
    """Noise of tokens, with their groups, in the shape that both broadcast to."""
    drawn = _hash(tl.load(keys), groups)
    own = _exponential(_hash(tl.load(keys + 1), tokens), tables)
    own = tl.where((tokens & 63) == (drawn & 63), 0, own)
    return _minus_log(own + (_exponential(drawn, tables) >> 6), tables)


@triton.jit(do_not_specialize=["row_stride", "size", "groups"])
def peaks_kernel(
    logits,  # [N, V] float32
    scale,  # [N] float64
    keys,  # [N, 2] int64
    tables,  # [4, CELLS] int64
    best,  # [N, G] float64
    tokens,  # [N, G] int64
    row_stride,
    size,  # V
    groups,  # G
    BLOCK: tl.constexpr,
):
    """The best score of each group of 64 tokens, and the token that has it (grid [N, G / BLOCK])."""
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    token = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    logit = tl.load(logits + row * row_stride + token, mask=token < size, other=float("-inf"))
    noise = _noise(token, group[:, None], keys + 2 * row, tables)
    score = logit.to(tl.float64) * tl.load(scale + row) + noise
    at = row * groups + group
    tl.store(best + at, tl.max(score, 1), mask=group < groups)
    tl.store(tokens + at, group * 64 + tl.argmax(score, 1), mask=group < groups)


@triton.jit(do_not_specialize=["count"])
def listed_kernel(
    tokens,  # [N, C] int64
    logits,  # [N, C] float32
    scale,  # [N] float64
    keys,  # [N, 2] int64
    tables,
    scores,  # [N, C] float64
    noises,  # [N, C] float64
    count,  # C
    BLOCK: tl.constexpr,
):
    """Scores and noise of each row's own tokens (grid [N, C / BLOCK])."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < count
    at = row * count + columns
    token = tl.load(tokens + at, mask=inside, other=0)
    noise = _noise(token, token >> 6, keys + 2 * row, tables)
    logit = tl.load(logits + at, mask=inside, other=0.0)
    tl.store(noises + at, noise, mask=inside)
    tl.store(scores + at, logit.to(tl.float64) * tl.load(scale + row) + noise, mask=inside)


@triton.jit(do_not_specialize=["row_stride", "size"])
def weights_kernel(
    logits,  # [N, V] float32
    highest,  # [N] float32, of each row
    temperature,  # [N] float32
    whole,  # [N] int64, zeros at first
    row_stride,
    size,  # V
    BLOCK: tl.constexpr,
):
    """The sum of the weights of each row's tokens; see `truncation.weights` (grid [N, V / BLOCK])."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * row_stride + token, mask=token < size, other=float("-inf"))
    heat = tl.div_rn(logit - tl.load(highest + row), tl.load(temperature + row))
    halvings = tl.maximum(heat.to(tl.float64), MIN_EXPONENT) * HALVINGS
    down = tl.floor(halvings)
    inside = halvings - down
    power = inside * POWER_6 + POWER_5
    power = power * inside + POWER_4
    power = power * inside + POWER_3
    power = power * inside + POWER_2
    power = power * inside + POWER_1
    power = power * inside + POWER_0
    weight = power.to(tl.int64) >> (0.0 - down).to(tl.int64)
    tl.atomic_add(whole + row, tl.sum(weight))
