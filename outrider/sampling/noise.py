"""Standard Gumbel noise as a pure function of (seed, position, token), in integer arithmetic.

The bits are the same on every device and in every process. They come from a counter-based hash (SplitMix64,
Steele, Lea and Flood 2014, whose 64-bit products wrap around in int64) and fixed-point logarithms from tables
of 1024 cells with linear interpolation. Nothing on the device rounds except int64 -> float64, which IEEE 754
defines.

A Gumbel variable is -ln of an exponential one, so the largest noise of a set of tokens is that of the
smallest exponential. Tokens form groups of 64. By the memoryless property, 64 independent exponentials
are distributed like one exponential divided by 64 (the smallest), one random member that has it, and for
every other member the smallest plus an exponential of its own. Drawn in this order, one hash bounds the
noise of 64 tokens, and the winner of a large vocabulary is found without drawing most of its noise
(`outrider.sampling.perturbed`).

Error of the map from hash to noise: below 3e-7. Largest value: 31.89, smallest: -2.68. Uniform numbers
have 38 bits below a half-life, so values above 25 (one group in 10^9) come in steps; an exponential beyond
21 half-lives (one in two million) is drawn within the 21st.

Shapes: N rows, G groups, K chosen tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

GROUP = 64
"""Number of tokens in a group, whose noise is drawn from one common smallest exponential."""

_WORD = 2**64 - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's step from state to state, and the factors of its two multiplications."""
TOKEN_STREAM = 0xD1B54A32D192ED03
"""Makes the key of a row's token stream from that of its group stream."""

CELLS = 1024
"""Cells of each table of logarithms."""
_EXPONENTIAL_BITS = 58  # fraction bits of an exponential; the largest, 21 ln 2, fills 62
_RATIO_BITS, _LOG_BITS, NOISE_BITS = 23, 32, 44  # fraction bits of both tables' numbers, and of noise
LN2_EXPONENTIAL = 199786072581291495  # round(ln 2 * 2**58)
LN2_NOISE = 12193974156573  # round(ln 2 * 2**44)


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Keys of the group stream and the token stream of each row: [N, 2] int64."""
    keys = row_key_pairs(seeds, positions)
    return torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 2)


def row_key_pairs(seeds: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int]]:
    """The keys that `row_keys` returns, as pairs of integers."""
    return [_row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]


@lru_cache(maxsize=4096)
def _row_key(seed: int, position: int) -> tuple[int, int]:
    """The keys of one row; they are cached, since a draft asks for a position many times."""
    key = _mix_word(_mix_word(seed) + position * GAMMA)
    return signed(key), signed(_mix_word(key ^ TOKEN_STREAM))


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Noise of some tokens at one position: [K] int64 -> [K] float64."""
    return gumbel_rows(row_keys([seed], [position], tokens.device), tokens[None])[0]


def gumbel_rows(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise of each row's own tokens: keys [N, 2], tokens [N, K] int64 -> [N, K] float64."""
    groups = _hash(_native(keys[:, :1]), _native(tokens >> 6))
    own = _exponential(_hash(_native(keys[:, 1:]), _native(tokens)))
    own *= _native(tokens & GROUP - 1) != groups & GROUP - 1
    own += _exponential(groups) >> 6
    return _tensor(_minus_log(own))


def peaks(keys: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The largest noise of each of the first groups of tokens, and the token that has it, from keys [N, 2].

    Both are [N, groups], as float64 and int64.
    """
    numbers = _native(torch.arange(groups, device=keys.device))
    hashed = _hash(_native(keys[:, :1]), numbers)
    noise = _minus_log(_exponential(hashed) >> 6)
    return _tensor(noise), _tensor(numbers * GROUP + (hashed & GROUP - 1))


Integers: TypeAlias = Any
"""An int64 array: torch's on an accelerator, numpy's on the CPU, where its calls cost a third of torch's.

Both have the operators used below, and give the same bits.
"""


def _hash(keys: Integers, counters: Integers) -> Integers:
    """SplitMix64's output number `counter` of the stream that starts at `key`."""
    state = counters * signed(GAMMA) + keys
    state ^= state >> 30 & 2**34 - 1
    state *= signed(MIX_1)
    state ^= state >> 27 & 2**37 - 1
    state *= signed(MIX_2)
    state ^= state >> 31 & 2**33 - 1
    return state


def _exponential(hashed: Integers) -> Integers:
    """Standard exponential with 58 fraction bits: k ln 2 - ln(1 - w / 2).

    k is geometric (the leading zeros of bits 6 to 25), w uniform (bits 26 to 63): an exponential is a
    geometric number of half-lives and a remainder within one, which keeps its relative precision.
    """
    half_lives = 1043 - (_float_bits((hashed >> 5 & 2**21 - 1) | 1) >> 52)
    uniform = hashed >> 26 & 2**38 - 1
    base, step = _ratio_table(hashed.device if isinstance(hashed, Tensor) else None)
    cell = uniform >> 28
    rest = (uniform & 2**28 - 1) * step[cell]
    rest >>= 28
    rest += base[cell]
    rest *= uniform << 1 | 1
    rest >>= 63 - _EXPONENTIAL_BITS
    rest += half_lives * LN2_EXPONENTIAL
    return rest


def _minus_log(exponential: Integers) -> Any:
    """-ln of a number with 58 fraction bits, as a float64 that is a multiple of 2^-44."""
    bits = _float_bits(exponential)  # sign, 11 bits of exponent, 52 of mantissa
    base, step = _log_table(exponential.device if isinstance(exponential, Tensor) else None)
    cell = bits >> 42 & CELLS - 1
    inside = (bits >> 14 & 2**28 - 1) * step[cell]
    inside >>= 28 - (NOISE_BITS - _LOG_BITS)
    inside += base[cell] << NOISE_BITS - _LOG_BITS
    exponent = 1023 + _EXPONENTIAL_BITS - (bits >> 52)
    exponent *= LN2_NOISE
    exponent -= inside
    return (exponent if isinstance(exponent, np.ndarray) else exponent.double()) * 2.0**-NOISE_BITS


def _native(tensor: Tensor) -> Integers:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _tensor(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def _float_bits(integers: Integers) -> Integers:
    """The bits of the nearest float64 (IEEE 754: to nearest, ties to even)."""
    if isinstance(integers, Tensor):
        return integers.double().view(torch.int64)
    return integers.astype(np.float64).view(np.int64)


def ratio_table() -> list[int]:
    """-ln(1 - v) / v for v = i / 2048, with 23 fraction bits."""
    ratios = [1.0] + [-math.log1p(-i / (2 * CELLS)) / (i / (2 * CELLS)) for i in range(1, CELLS + 1)]
    return [round(math.ldexp(ratio, _RATIO_BITS)) for ratio in ratios]


def log_table() -> list[int]:
    """ln(1 + i / 1024), with 32 fraction bits."""
    return [round(math.ldexp(math.log1p(i / CELLS), _LOG_BITS)) for i in range(CELLS + 1)]


@cache
def _ratio_table(device: torch.device | None) -> tuple[Integers, Integers]:
    return _with_steps(ratio_table(), device)


@cache
def _log_table(device: torch.device | None) -> tuple[Integers, Integers]:
    return _with_steps(log_table(), device)


def _with_steps(values: list[int], device: torch.device | None) -> tuple[Integers, Integers]:
    """A table and the step from each entry to the next; numpy arrays if there is no device."""
    base, step = np.array(values[:-1]), np.diff(values)
    if device is None:
        return base, step
    with torch.inference_mode(False):  # otherwise the tables could not be used outside of that mode
        return torch.tensor(base, device=device), torch.tensor(step, device=device)


def _mix_word(word: int) -> int:
    word = (word + GAMMA) & _WORD
    word = ((word ^ word >> 30) * MIX_1) & _WORD
    word = ((word ^ word >> 27) * MIX_2) & _WORD
    return word ^ word >> 31


def signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - 2**64 if word >> 63 else word
