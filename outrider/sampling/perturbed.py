"""The tokens with the highest `scale x logit + noise`, without drawing most of the noise.

The largest noise of 64 tokens costs one draw (`noise.peaks`). With the largest logit of a group it bounds
the group, with a token's own logit the token. A few scores computed outright give a floor that the winner
cannot be below, and only tokens whose bound reaches the floor are drawn: some 20 to 60 of a row, whatever
the vocabulary, so the result is exact and most noise is never looked at.

Shapes: N rows, V vocabulary, G groups of 64 tokens, S survivors over all rows, K leaders of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling.noise import GROUP, Peaks, gumbel_rows, members, peaks

_PROBES = 4
"""Groups of highest logit whose first token is scored outright for the floor."""


class Leaders(NamedTuple):
    """The highest scores of each row, best first; all [N, K]."""

    tokens: Tensor
    """int64"""
    scores: Tensor
    """float64; -inf where the row has no further token."""
    noise: Tensor
    """float64, the part of the score that is noise."""


def leaders(logits: Tensor, scale: Tensor, keys: Tensor, count: int, sure: int) -> Leaders:
    """The `count` leaders over the vocabulary: logits [N, V], scale [N] float64 > 0, keys [N, 2].

    The first `sure` are exact; the others are the best among the tokens that were drawn.
    """
    grouped = _grouped(logits)
    highest = peaks(keys, grouped.shape[1])
    field = _Field(grouped, scale, keys, highest, grouped.amax(-1))
    rows, tokens, noise = _survivors(field, _floor(field, sure))
    scores = _scores(grouped.flatten(1)[rows, tokens], scale[rows], noise)
    return _top(*_by_row(rows, tokens, scores, noise, len(logits), count), count)


def leaders_among(tokens: Tensor, logits: Tensor, scale: Tensor, keys: Tensor, count: int) -> Leaders:
    """The `count` leaders among each row's own tokens: tokens and logits [N, C]."""
    noise = gumbel_rows(keys, tokens)
    return _top(tokens, _scores(logits, scale[:, None], noise), noise, min(count, tokens.shape[1]))


class _Field(NamedTuple):
    """What a search runs over."""

    logits: Tensor  # [N, G, 64]
    scale: Tensor  # [N]
    keys: Tensor  # [N, 2]
    highest: Peaks
    largest: Tensor  # [N, G], the largest logit of each group


def _floor(field: _Field, sure: int) -> Tensor:
    """A score [N] that the row's `sure`-th best is not below: that of some tokens scored outright.

    They are, of each group, the token with the largest noise, and of a few groups the largest logit.
    """
    scale = field.scale[:, None]
    member = field.highest.member
    at_peak = _scores(field.logits.gather(2, member[..., None])[..., 0], scale, field.highest.noise)
    groups = field.largest.topk(min(_PROBES, field.largest.shape[1])).indices
    best = field.logits.gather(1, groups[..., None].expand(-1, -1, GROUP)).max(-1)
    noise = gumbel_rows(field.keys, groups * GROUP + best.indices)
    probed = _scores(best.values, scale, noise)
    probed.masked_fill_(best.indices == member.gather(1, groups), -torch.inf)  # already in at_peak
    known = torch.cat([at_peak, probed], 1)
    if known.shape[1] < sure:
        return torch.full_like(field.scale, -torch.inf)
    return known.topk(sure).values[:, -1]


def _survivors(field: _Field, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row, token and noise of every token whose bound reaches its row's floor; all [S], by row."""
    bounds = _scores(field.largest, field.scale[:, None], field.highest.noise)
    rows, groups = _reaching(bounds, floor[:, None])
    noise, member, smallest = (part[rows, groups] for part in field.highest)
    bounds = _scores(field.logits[rows, groups], field.scale[rows, None], noise[:, None])  # [groups, 64]
    chosen, offsets = _reaching(bounds, floor[rows, None])
    rows, tokens = rows[chosen], groups[chosen] * GROUP + offsets
    return rows, tokens, members(field.keys[rows, 1], tokens, member[chosen], smallest[chosen])


def _reaching(bounds: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the bounds at or above the floor."""
    rows, columns = ((bounds >= floor) & (bounds > -torch.inf)).nonzero(as_tuple=True)
    return rows, columns


def _by_row(
    rows: Tensor, tokens: Tensor, scores: Tensor, noise: Tensor, count_rows: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [S] that are sorted by row as [N, longest] tables, -inf where a row has no more."""
    lengths = rows.bincount(minlength=count_rows)
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(len(rows), device=rows.device) - starts[rows]
    shape = (count_rows, max(int(lengths.max()), count))
    tables = (tokens.new_zeros(shape), scores.new_full(shape, -torch.inf), noise.new_zeros(shape))
    for table, values in zip(tables, (tokens, scores, noise), strict=True):
        table[rows, columns] = values
    return tables


def _scores(logits: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    # One expression for bounds and scores: each step is monotone, so no score exceeds its bound.
    return logits.double() * scale + noise


def _top(tokens: Tensor, scores: Tensor, noise: Tensor, count: int) -> Leaders:
    top = scores.topk(count)
    return Leaders(tokens.gather(1, top.indices), top.values, noise.gather(1, top.indices))


def _grouped(logits: Tensor) -> Tensor:
    """[N, V] -> [N, G, 64], padded with -inf."""
    missing = -logits.shape[1] % GROUP
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits.reshape(len(logits), -1, GROUP)
