"""Finds the tokens of a row with the highest `scale x logit + noise`, and a draft's ranking of them.

Tokens form groups of 64 (`outrider.sampling.noise`). The highest logit of a group and the largest noise of
its tokens bound their scores, and cost one draw. The noise of a token is drawn only if this bound and the
token's own logit allow it to lead. Of equal scores the lower token leads. NaN never leads.

Shapes: V vocabulary, G groups, K leaders, E edges of buckets, S sharpnesses.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.engine.cpu.kernels.compiling import Float32, Int32, inlined, kernel
from outrider.sampling.kernels.noise import exponential, hashed, keys_of, minus_log
from outrider.sampling.kernels.truncation import TOKEN_BITS, logit_of, ordered
from outrider.sampling.noise import GROUP

Logits = NDArray[np.float32]
Numbers = NDArray[np.float64]
Tokens = NDArray[np.int64]

_NOTHING = np.int32(2**23 - 2**31)
"""The value of `ordered` for -inf."""


@inlined
def _ordered_or_nothing(logit: Float32) -> Int32:
    return ordered(logit) if logit == logit else _NOTHING


@kernel("float32(float32[::1], float32[::1])", keeps_lock=True)
def find_maxima(logits: Logits, maxima: Logits) -> float:
    """Write the highest of each group of logits [V] into [G], and return the highest of all; NaN counts as
    -inf.

    Logits are compared as integers, because LLVM vectorizes maxima of these.
    """
    size, top = len(logits), _NOTHING
    for group in range(size // GROUP):
        highest = _NOTHING
        for place in range(GROUP):  # LLVM turns a loop of known length into a few vector operations
            logit = _ordered_or_nothing(logits[group * GROUP + place])
            highest = logit if logit > highest else highest
        top = highest if highest > top else top
        maxima[group] = logit_of(highest)
    if size % GROUP:
        highest = _NOTHING
        for token in range(size // GROUP * GROUP, size):
            logit = _ordered_or_nothing(logits[token])
            highest = logit if logit > highest else highest
        top = highest if highest > top else top
        maxima[-1] = logit_of(highest)
    return float(logit_of(top))


@inlined
def _insert(token: int, score: float, noise: float, tokens: Tokens, scores: Numbers, noises: Numbers) -> None:
    """Insert a token at its place among the leaders; it must beat the last of them."""
    place = len(scores) - 1
    while place > 0 and score > scores[place - 1]:
        tokens[place] = tokens[place - 1]
        scores[place] = scores[place - 1]
        noises[place] = noises[place - 1]
        place -= 1
    tokens[place] = token
    scores[place] = score
    noises[place] = noise


@kernel(
    "void(float32[::1], float32[::1], int64, float64, boolean, uint64, uint64,"
    "     int64[::1], float64[::1], float64[::1])",
    keeps_lock=True,
)
def lead(
    logits: Logits,
    maxima: Logits,
    lowest: int,
    scale: float,
    sampled: bool,
    seed: int,
    position: int,
    tokens: Tokens,
    scores: Numbers,
    noises: Numbers,
) -> None:
    """Write the K leaders of a row, best first, from its logits [V] and the `maxima` of its groups [G].

    Tokens whose key is below `lowest` are left out. A missing leader is token 0 with the score -inf. If not
    `sampled`, there is no noise.
    """
    last = len(scores) - 1
    for place in range(len(scores)):
        tokens[place] = 0
        scores[place] = -np.inf
        noises[place] = 0.0
    lowest_logit = logit_of(np.int32(lowest >> TOKEN_BITS))
    group_key, token_key = keys_of(seed, position)
    for group in range(len(maxima)):
        if maxima[group] < lowest_logit:
            continue
        drawn = hashed(group_key, np.uint64(group))
        smallest = exponential(drawn) >> 6
        peak = minus_log(smallest) if sampled else 0.0
        if not maxima[group] * scale + peak > scores[last]:
            continue
        for token in range(group * GROUP, min(group * GROUP + GROUP, len(logits))):
            scaled = logits[token] * scale
            if not scaled + peak > scores[last]:
                continue
            if np.int64(ordered(logits[token])) << TOKEN_BITS | token < lowest:
                continue
            noise = 0.0
            if sampled:
                at_peak = token % GROUP == np.int64(drawn) % GROUP
                own = exponential(hashed(token_key, np.uint64(token)))
                noise = minus_log(smallest if at_peak else smallest + own)
            if scaled + noise > scores[last]:
                _insert(token, scaled + noise, noise, tokens, scores, noises)


@kernel(
    "int64(int64[::1], float64[::1], float64[::1], float64, float64, float64,"
    "      float64[::1], float64[::1], int64[::1], int64[::1])",
    keeps_lock=True,
)
def describe(
    tokens: Tokens,
    scores: Numbers,
    noises: Numbers,
    total: float,
    flatness: float,
    slope: float,
    edges: Numbers,
    grid: Numbers,
    buckets: Tokens,
    winners: Tokens,
) -> int:
    """Write the bucket of each of the K leaders' shares, and the winner at each sharpness [S].

    A share is exp((score - highest score) / flatness) / total; a total of 0 stands for the sum over the
    leaders. Returns the number of leaders, which is below K if truncation left fewer.
    """
    known = 0.0
    left = 0
    for place in range(len(scores)):
        known += math.exp((scores[place] - scores[0]) / flatness)
        left += scores[place] > -np.inf
    for place in range(len(scores)):
        share = math.exp((scores[place] - scores[0]) / flatness) / (total if total > 0.0 else known)
        buckets[place] = 0
        for edge in range(len(edges)):
            buckets[place] += share >= edges[edge]
    for place in range(len(grid)):
        best = -np.inf
        winners[place] = tokens[0]
        for leader in range(len(tokens)):
            score = (scores[leader] - noises[leader]) / slope * grid[place] + noises[leader]
            if score > best:
                best = score
                winners[place] = tokens[leader]
    return left
