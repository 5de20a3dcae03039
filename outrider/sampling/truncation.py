"""Applies top-k, top-p and min-p, in that order, and returns a short list of the tokens that stay.

Tokens are ordered by logit, and equal logits by token id, highest first: the order is the same for every
batch shape. Ties follow transformers (with a stable sort): all tokens equal to the k-th stay; among equal
tokens at the edge of the nucleus, low ids are dropped first. Probabilities are integers, made only of rounded
products and sums, so they have the same bits on every device, and no sum of them depends on its order.

Shapes: N rows, V vocabulary, C listed candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.protocol.messages import SamplingParams

_FIRST_LISTED, _GROWTH = 128, 8
"""Tokens of a row's first list, and how many times as many the next list has where more could stay."""
LOG2_E = 1.4426950408889634
EXPONENT_FLOOR = -43.0
"""Exponent at and below which a token has no weight."""
POWER = tuple(
    math.ldexp(factor, 40)
    for factor in (
        *(1.0, 0.6931471708649766, 0.24022720418109816, 0.05549602356402293),
        *(0.009652195056014735, 0.0012692166069140853, 0.00020817915043540744),
    )
)
"""2^(40 + x) for 0 <= x < 1 as a polynomial, interpolated so that 0 gives 2^40; relative error below 6e-9."""


class Kept(NamedTuple):
    """The tokens of some rows that truncation keeps, best first."""

    rows: Tensor
    """[n] int64, the indices of the rows"""
    tokens: Tensor
    """[n, C] int64"""
    logits: Tensor
    """[n, C] float32; -inf where dropped."""


def truncates(params: SamplingParams) -> bool:
    """True if the parameters can drop tokens."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


class BatchTruncation(NamedTuple):
    """The limits of all rows as columns [N, 1], with values that drop nothing where a limit is off."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    whole: Tensor
    """Weight of the whole row for top-p; 0 if top-k comes first, and the listed tokens are everything."""


def kept(logits: Tensor, params: Sequence[SamplingParams]) -> Iterator[Kept]:
    """Truncate each row of logits [N, V] float32 by its own parameters (temperature above 0).

    Rows come in parts, those with short lists first.
    """
    rows = torch.arange(len(logits), device=logits.device)
    return _list(rows, logits, _limits(logits, params), _FIRST_LISTED)


def _limits(logits: Tensor, params: Sequence[SamplingParams]) -> BatchTruncation:
    size = logits.shape[1]

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    limits = BatchTruncation(
        column([p.temperature for p in params], torch.float32),
        column([p.top_k if 0 < p.top_k < size else size for p in params], torch.int64),
        column([p.top_p if p.top_p < 1.0 else math.inf for p in params], torch.float64),
        column([math.log(p.min_p) if p.min_p else -math.inf for p in params], torch.float64),
        logits.new_zeros(()),  # `with_whole` replaces it
    )
    whole = None
    if any(nucleus_only(p, size) for p in params):
        whole = _weights(logits, logits.amax(-1, keepdim=True), limits.temperature).sum(-1, keepdim=True)
    return with_whole(limits, whole, size)


def nucleus_only(params: SamplingParams, size: int) -> bool:
    """True if top-p is over the whole vocabulary of `size` tokens."""
    return params.top_p < 1.0 and not 0 < params.top_k < size


def with_whole(limits: BatchTruncation, whole: Tensor | None, size: int) -> BatchTruncation:
    """The limits with the weight [N, 1] of whole rows of `size` tokens; it is None if no row needs it."""
    if whole is None:
        return limits._replace(whole=torch.zeros_like(limits.top_k))
    return limits._replace(whole=whole.masked_fill(limits.top_k < size, 0))


class Listing(NamedTuple):
    """The highest tokens of some rows, in order."""

    tokens: Tensor
    """[N, C] int64"""
    logits: Tensor
    """[N, C]"""
    stays: Tensor
    """[N, C] bool"""
    complete: Tensor
    """[N] bool; whether no unlisted token could stay."""


def listing(logits: Tensor, limits: BatchTruncation, listed: int) -> Listing:
    """The `listed` highest tokens of each row [N, V], and which of them truncation leaves."""
    tokens = _in_order(logits.topk(listed))
    values = logits.gather(1, tokens)
    stays = _stays(values, limits)
    complete = torch.ones_like(stays[:, 0])
    if listed < logits.shape[1]:
        # Unlisted tokens may equal the last listed one, so the list is complete only if that one is dropped.
        complete = ~(stays & (values == values[:, -1:])).any(-1)
        complete &= (limits.top_k[:, 0] == logits.shape[1]) | (values[:, -1] < _lowest(values, limits)[:, 0])
    return Listing(tokens, values, stays, complete)


def _list(rows: Tensor, logits: Tensor, limits: BatchTruncation, listed: int) -> Iterator[Kept]:
    """List the highest tokens of each row; rows where more could stay get a longer list."""
    listed = min(listed, logits.shape[1])
    tokens, values, stays, complete = listing(logits, limits, listed)
    if complete.any():
        stays = stays[complete]
        width = max(int(stays.sum(-1).max()), 1)  # 0 when every logit is -inf or NaN
        left = values[complete].masked_fill(~stays, -torch.inf)
        yield Kept(rows[complete], tokens[complete][:, :width], left[:, :width])
    if not complete.all():
        longer = ~complete
        part = BatchTruncation(*(column[longer] for column in limits))
        yield from _list(rows[longer], logits[longer], part, listed * _GROWTH)


def _stays(values: Tensor, limits: BatchTruncation) -> Tensor:
    """Which listed tokens stay: values [N, C] are the row's highest logits in order."""
    in_top_k = (values >= _lowest(values, limits)) & (values > -torch.inf)
    weights = _weights(values, values[:, :1], limits.temperature).masked_fill_(~in_top_k, 0)
    above = weights.cumsum(-1) - weights
    total = torch.where(limits.whole > 0, limits.whole, weights.sum(-1, keepdim=True))
    in_nucleus = above < limits.top_p * total
    likely = (values - values[:, :1]).double() / limits.temperature >= limits.log_min_p
    return in_top_k & in_nucleus & likely


def _lowest(values: Tensor, limits: BatchTruncation) -> Tensor:
    """The k-th highest logit of each row [N, 1], or the lowest listed one if k is beyond the list."""
    return values.gather(1, (limits.top_k - 1).clamp(max=values.shape[1] - 1))


def _weights(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities as integers, 2^40 for the most likely token."""
    return weights((logits - highest).div_(temperature).double())


def weights(exponents: Tensor) -> Tensor:
    """2^40 exp(x) of float64 x <= 0, as int64."""
    halvings = exponents.clamp(min=EXPONENT_FLOOR).mul_(LOG2_E)
    whole = halvings.floor()
    inside = halvings.sub_(whole)
    power = torch.full_like(inside, POWER[-1])
    for factor in POWER[-2::-1]:
        power.mul_(inside).add_(factor)
    return power.long() >> whole.neg_().long()


def _in_order(top: torch.return_types.topk) -> Tensor:
    """Token ids [N, C] by logit, equal logits by id, highest first."""
    bits = (top.values + 0.0).view(torch.int32)  # + 0.0: both zeros become one
    ascending = bits ^ ((bits >> 31) & 2**31 - 1)
    keys = (ascending.long() << 32) | top.indices
    return keys.sort(descending=True).values & 2**32 - 1
