"""The tokens with the highest `scale x logit + noise`, without drawing most of the noise.

The largest noise of 64 tokens costs one draw (`noise.peaks`). With the largest logit of a group it bounds
the group, with a token's own logit the token. The tokens of highest bound are drawn; when a score among them
exceeds every other bound, it leads the vocabulary. Where none does, every token is drawn whose bound reaches
the best score so far: still some tens, whatever the vocabulary, so most noise is never looked at.

`outrider.sampling.kernels.search` does the same token by token; this serves where nothing can be compiled.

Shapes: N rows, V vocabulary, G groups of 64 tokens, S survivors over all rows, K leaders of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling.noise import GROUP, Peaks, gumbel_rows, members, peaks

_DRAWN = 64
"""Tokens of a row that are drawn at first."""
_DRAWN_GROUPS = 32
"""Groups that they come from."""


class Leaders(NamedTuple):
    """The highest scores of each row, best first; all [N, K]."""

    tokens: Tensor
    """int64"""
    scores: Tensor
    """float64; -inf where the row has no further token."""
    noise: Tensor
    """float64, the part of the score that is noise."""


def leaders(logits: Tensor, scale: Tensor, keys: Tensor, count: int) -> Leaders:
    """The `count` leaders over the vocabulary: logits [N, V], scale [N] float64 > 0, keys [N, 2]."""
    grouped = _grouped(logits)
    highest = peaks(keys, grouped.shape[1])
    bounds = _scores(grouped.amax(-1), scale[:, None], highest.noise)
    field = _Field(grouped, scale, keys[:, 1:], highest, bounds)
    found, limit = _draw_some(field, count)
    floor = found.scores[:, -1]
    doubtful = ((floor <= limit) & (limit > -torch.inf)).nonzero()[:, 0]
    if len(doubtful):
        exact = _draw_all(field.part(doubtful), floor[doubtful], count)
        for column, better in zip(found, exact, strict=True):
            column[doubtful] = better
    return found


def leaders_among(tokens: Tensor, logits: Tensor, scale: Tensor, keys: Tensor, count: int) -> Leaders:
    """The `count` leaders among each row's own tokens: tokens and logits [N, C]."""
    noise = gumbel_rows(keys, tokens)
    return _top(tokens, _scores(logits, scale[:, None], noise), noise, min(count, tokens.shape[1]))


class _Field(NamedTuple):
    """What a search runs over."""

    logits: Tensor  # [N, G, 64]
    scale: Tensor  # [N]
    token_keys: Tensor  # [N, 1]
    highest: Peaks
    bounds: Tensor  # [N, G], no token of a group scores higher

    def part(self, rows: Tensor) -> _Field:
        """Some of the rows."""
        highest = Peaks(*(column[rows] for column in self.highest))
        return _Field(self.logits[rows], self.scale[rows], self.token_keys[rows], highest, self.bounds[rows])


def _draw_some(field: _Field, count: int) -> tuple[Leaders, Tensor]:
    """The leaders among the tokens of highest bound, and a bound [N] of all other scores."""
    drawn = max(_DRAWN, 2 * count)
    groups, group_limit = _best(field.bounds, max(_DRAWN_GROUPS, count))
    logits = field.logits.gather(1, groups[..., None].expand(-1, -1, GROUP))  # [N, groups, 64]
    scale, highest = field.scale[:, None], field.highest
    bounds = _scores(logits, scale[..., None], highest.noise.gather(1, groups)[..., None])
    places, token_limit = _best(bounds.flatten(1), drawn)
    tokens, group = _tokens(groups, places)
    noise = members(
        field.token_keys, tokens, highest.member.gather(1, group), highest.smallest.gather(1, group)
    )
    scores = _scores(logits.flatten(1).gather(1, places), scale, noise)
    return _top(tokens, scores, noise, count), torch.maximum(group_limit, token_limit)


def _draw_all(field: _Field, floor: Tensor, count: int) -> Leaders:
    """The leaders among all tokens whose bound reaches their row's floor [N]."""
    rows, groups = _reaching(field.bounds, floor[:, None])
    noise, member, smallest = (part[rows, groups] for part in field.highest)
    logits = field.logits[rows, groups]  # [groups, 64]
    chosen, offsets = _reaching(_scores(logits, field.scale[rows, None], noise[:, None]), floor[rows, None])
    rows, tokens = rows[chosen], groups[chosen] * GROUP + offsets
    noise = members(field.token_keys[rows, 0], tokens, member[chosen], smallest[chosen])
    scores = _scores(logits[chosen, offsets], field.scale[rows], noise)
    return _top(*_by_row(rows, tokens, scores, noise, len(floor), count), count)


def _best(bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places [N, count] of the highest of some bounds [N, n], and the highest of the others [N]."""
    rows, size = bounds.shape
    if count >= size:
        places = torch.arange(size, device=bounds.device).expand(rows, size)
        return places, torch.full((rows,), -torch.inf, dtype=torch.float64, device=bounds.device)
    top = bounds.topk(count + 1)
    return top.indices[:, :count], top.values[:, count]


def _tokens(groups: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their groups [N, n] at places among the tokens of some groups [N, g]."""
    group = groups.gather(1, places >> 6)
    return group * GROUP + (places & GROUP - 1), group


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
