"""Finds the tokens with the highest `scale x logit + noise`, without drawing most of the noise.

The largest noise of 64 tokens costs one draw (`noise.peaks`), and is the noise of one of them. So each group
yields one exact score, and a bound for its other tokens. The noise of tokens whose bound reaches the K-th of
those scores is drawn: for some tens of tokens, whatever the size of the vocabulary.

`outrider.sampling.kernels.search` does the same token by token; this is for machines without a compiler.

Shapes: N rows, V vocabulary, K leaders of a row, C listed tokens of a row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling.noise import GROUP, gumbel_rows, peaks
from outrider.speculation.acceptance import SHARPNESS_GRID


class Leaders(NamedTuple):
    """The highest scores of each row, best first; all [N, K]."""

    tokens: Tensor
    """int64"""
    scores: Tensor
    """float64; -inf if the row has no further token."""
    noise: Tensor
    """float64; the noise in the score."""


def leaders(logits: Tensor, scale: Tensor, keys: Tensor, count: int) -> Leaders:
    """The `count` leaders over the vocabulary: logits [N, V], scale [N] float64 > 0, keys [N, 2]."""
    size = logits.shape[1]
    noise, at_peak = peaks(keys, -(-size // GROUP))
    bounds = _scores(logits, scale, noise.repeat_interleave(GROUP, 1)[:, :size])
    exact = bounds.gather(1, at_peak.clamp(max=size - 1)).masked_fill(at_peak >= size, -torch.inf)
    floor = exact.topk(count).values[:, -1:] if count <= exact.shape[1] else -torch.inf
    reaching = ((bounds >= floor) & (bounds > -torch.inf)).sum(-1)
    drawn = min(max(int(reaching.max()), count), size)
    tokens = bounds.topk(drawn).indices
    return leaders_among(tokens, logits.gather(1, tokens), scale, keys, count)


def leaders_among(tokens: Tensor, logits: Tensor, scale: Tensor, keys: Tensor, count: int) -> Leaders:
    """The `count` leaders among each row's own tokens: tokens and logits [N, C]."""
    noise = gumbel_rows(keys, tokens)
    top = _scores(logits, scale, noise).topk(min(count, tokens.shape[1]))
    return Leaders(tokens.gather(1, top.indices), top.values, noise.gather(1, top.indices))


def would_win(found: Leaders, slope: Tensor) -> Tensor:
    """The leader that each sharpness of SHARPNESS_GRID would put first: slopes [N, 1] -> [N, sharpness]."""
    logits = (found.scores - found.noise) / slope
    scores = logits[:, None] * _grid(logits.device)[:, None] + found.noise[:, None]  # [N, sharpness, K]
    return found.tokens.gather(1, scores.argmax(-1))


@cache
def _grid(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # otherwise the tensor could not be used outside of that mode
        return torch.tensor(SHARPNESS_GRID, dtype=torch.float64, device=device)


def _scores(logits: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    # One expression for bounds and scores: each step is monotone, so no score exceeds its bound.
    return logits.double() * scale[:, None] + noise
