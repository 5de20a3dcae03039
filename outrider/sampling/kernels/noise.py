"""The noise of `outrider.sampling.noise`, one token at a time.

Hashes are uint64, because signed products must not overflow in compiled code; everything else is int64.
"""

from __future__ import annotations

import numpy as np

from outrider.engine.cpu.kernels.compiling import Float64, Int64, UInt64, inlined
from outrider.sampling import noise
from outrider.sampling.noise import LN2_EXPONENTIAL, LN2_NOISE

GAMMA, MIX_1, MIX_2, TOKEN_STREAM = (
    np.uint64(word) for word in (noise.GAMMA, noise.MIX_1, noise.MIX_2, noise.TOKEN_STREAM)
)
RATIOS = np.array(noise.ratio_table())
LOGS = np.array(noise.log_table())
ONE = np.uint64(1)


@inlined
def hashed(key: UInt64, counter: UInt64) -> UInt64:
    """SplitMix64's output number `counter` of the stream that starts at `key`."""
    state = counter * GAMMA + key
    state = (state ^ state >> 30) * MIX_1
    state = (state ^ state >> 27) * MIX_2
    return state ^ state >> 31


@inlined
def keys_of(seed: UInt64, position: UInt64) -> tuple[UInt64, UInt64]:
    """Keys of the group stream and the token stream of a row; see `noise.row_keys`."""
    groups = hashed(hashed(seed, ONE) + position * GAMMA, ONE)
    return groups, hashed(groups ^ TOKEN_STREAM, ONE)


@inlined
def exponential(drawn: UInt64) -> Int64:
    """Standard exponential with 58 fraction bits; see `noise._exponential`."""
    half_lives = 1043 - (_float_bits(np.int64(drawn >> 5) & 2**21 - 1 | 1) >> 52)
    uniform = np.int64(drawn >> 26)
    cell = uniform >> 28
    rest = RATIOS[cell] + ((uniform & 2**28 - 1) * (RATIOS[cell + 1] - RATIOS[cell]) >> 28)
    return (rest * (uniform << 1 | 1) >> 5) + half_lives * LN2_EXPONENTIAL


@inlined
def minus_log(exponential: Int64) -> Float64:
    """-ln of an exponential; see `noise._minus_log`."""
    bits = _float_bits(exponential)
    cell = bits >> 42 & 1023
    inside = (LOGS[cell] << 12) + ((bits >> 14 & 2**28 - 1) * (LOGS[cell + 1] - LOGS[cell]) >> 16)
    return np.float64((1081 - (bits >> 52)) * LN2_NOISE - inside) * 2.0**-44


@inlined
def _float_bits(integer: Int64) -> Int64:
    return np.float64(integer).view(np.int64)
