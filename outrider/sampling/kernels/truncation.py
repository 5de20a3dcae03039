"""Truncation as one number: the lowest key of a row of logits that `outrider.sampling.truncation` keeps.

A key orders the tokens of a row: its high bits are the logit as an integer, its low bits the token id. Tokens
that may stay are listed and sorted; a floor for the logit keeps the list short.

Shapes: V vocabulary, G groups of 64 tokens, C listed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.cpu.kernels.compiling import Float32, Int32, Int64, inlined, kernel
from outrider.protocol.messages import SamplingParams
from outrider.sampling.noise import GROUP
from outrider.sampling.truncation import EXPONENT_FLOOR, LOG2_E, POWER

Logits = NDArray[np.float32]
Keys = NDArray[np.int64]

TOKEN_BITS = 31
"""Low bits of a key, which hold the token id."""
LOWEST = -(2**62)
"""A value that no key is below."""
_TOKEN = 2**TOKEN_BITS - 1
_FINITE = float(np.finfo(np.float32).min)
_LOG_UNIT = 40.0 * math.log(2.0)
"""Natural logarithm of the weight of the highest logit."""
_FIRST_LISTED = 8.0
"""The first list has the tokens that weigh at least this multiple of the lightest possible in the nucleus."""


@inlined
def ordered(logit: Float32) -> Int32:
    """An integer that is ordered like the logits; both zeros have the same one."""
    bits = np.float32(logit + np.float32(0.0)).view(np.int32)
    return np.int32(bits ^ (bits >> 31 & 2**31 - 1))


@inlined
def logit_of(ordered: Int32) -> Float32:
    """The inverse of `ordered`."""
    return np.int32(ordered ^ (ordered >> 31 & 2**31 - 1)).view(np.float32)


@inlined
def weight(logit: Float32, top: Float32, temperature: Float32) -> Int64:
    """2^40 exp((logit - top) / temperature); see `outrider.sampling.truncation.weights`."""
    exponent = np.float64((logit - top) / temperature)
    halvings = (exponent if exponent > EXPONENT_FLOOR else EXPONENT_FLOOR) * LOG2_E
    whole = np.floor(halvings)
    inside = halvings - whole
    power = POWER[6]
    for place in (5, 4, 3, 2, 1, 0):
        power = power * inside + POWER[place]
    return np.int64(power) >> np.int64(-whole)


@kernel("int64(float32[::1], float32, float32)", keeps_lock=True)
def weight_of_all(logits: Logits, top: float, temperature: float) -> int:
    """The sum of the weights of logits [V], of which `top` is the highest."""
    total = 0
    for token in range(len(logits)):
        total += weight(logits[token], top, temperature)
    return total


@kernel("int64(float32[::1], float32[::1], float64, int64[::1])", keeps_lock=True)
def list_from(logits: Logits, maxima: Logits, floor: float, keys: Keys) -> int:
    """Write the keys of the tokens whose logit is not below a floor; returns the number of keys.

    Takes logits [V], the highest of each group [G], and room for V keys.
    """
    listed = 0
    for group in range(len(maxima)):
        if maxima[group] >= floor:
            for token in range(group * GROUP, min(group * GROUP + GROUP, len(logits))):
                if logits[token] >= floor:
                    keys[listed] = np.int64(ordered(logits[token])) << TOKEN_BITS | token
                    listed += 1
    return listed


@kernel("int64(float32[::1], int64[::1], float32, float32, float64, int64, float64)", keeps_lock=True)
def outside(
    logits: Logits, keys: Keys, top: float, temperature: float, top_p: float, total: int, log_min_p: float
) -> int:
    """The number of lowest keys that top-p and min-p drop, from logits [V] and sorted keys [C].

    Top-p drops a key if the keys above it weigh at least `top_p` x `total`. A total of 0 stands for the
    weight of all keys.
    """
    if total == 0:
        for place in range(len(keys)):
            total += weight(logits[keys[place] & _TOKEN], top, temperature)
    limit = top_p * total
    above = 0
    left = len(keys)
    while left > 0 and np.float64(above) < limit:
        left -= 1
        above += weight(logits[keys[left] & _TOKEN], top, temperature)
    while left < len(keys):
        behind = np.float64(logits[keys[left] & _TOKEN] - top)
        if behind / np.float64(temperature) >= log_min_p:
            break
        left += 1
    return left


class RowTruncation(NamedTuple):
    """The parameters of a row; a limit that is off has a value that drops nothing."""

    temperature: float
    """Above 0."""
    top_k: int
    """0 if it is off."""
    top_p: float
    log_min_p: float

    @classmethod
    def of(cls, params: SamplingParams, size: int) -> RowTruncation:
        """The limits that `params` set for a vocabulary of `size` tokens."""
        return cls(
            params.temperature,
            params.top_k if params.top_k < size else 0,
            params.top_p if params.top_p < 1.0 else math.inf,
            math.log(params.min_p) if params.min_p else -math.inf,
        )


def lowest_key(logits: Logits, maxima: Logits, top: float, limits: RowTruncation) -> int:
    """The lowest key that the limits keep, from logits [V], and the highest of each group [G] and of all."""
    nucleus_only = limits.top_p < 1.0 and not limits.top_k
    total = weight_of_all(logits, top, limits.temperature) if nucleus_only else 0
    keys = np.empty(len(logits), np.int64)
    for floor in _floors(len(logits), maxima, top, limits, total):
        listed = keys[: list_from(logits, maxima, max(floor, _FINITE), keys)]
        listed.sort()
        if 0 < limits.top_k < len(listed):  # all tokens equal to the k-th stay
            kth = listed[-limits.top_k] >> TOKEN_BITS << TOKEN_BITS
            listed = listed[np.searchsorted(listed, kth) :]
        dropped = outside(logits, listed, top, limits.temperature, limits.top_p, total, limits.log_min_p)
        if dropped:
            break
    return int(listed[dropped]) if dropped < len(listed) else LOWEST


def _floors(size: int, maxima: Logits, top: float, limits: RowTruncation, total: int) -> Iterator[float]:
    """Yield floors for the logit. No token below the last one stays, nor below one at which the list holds a
    token that is dropped."""
    if limits.top_k:
        # The k-th highest logit is not below the k-th highest of the groups' maxima.
        yield np.partition(maxima, -limits.top_k)[-limits.top_k] if limits.top_k <= len(maxima) else -math.inf
    elif limits.top_p < 1.0:
        # All tokens lighter than this together weigh at most half of what is outside of the nucleus.
        share = (1.0 - limits.top_p) * total / (2 * size)
        for least in (_FIRST_LISTED * share, share):
            logarithm = math.log(least) if least > 1.0 else -math.inf
            yield top + limits.temperature * (logarithm - _LOG_UNIT)
    else:
        yield top + limits.temperature * limits.log_min_p * (1.0 + 1e-5)  # the factor allows for rounding
