"""The choices and rankings of `outrider.sampling.chooser` on a GPU, with one wait: the read of the result.

    upload    keys and parameters of all rows in one pinned copy that nothing waits for
    launch    scores, truncation, arg-max of all rows; the forward may still run meanwhile
    read      one small table

The logits are those after penalties, biases and masks. Of a truncated row the highest LISTED tokens are
looked at; where more could stay, which is known only on the device, the row comes back as UNKNOWN, to be
chosen the long way.

Kernels are launched on the thread's current device, hence `device_of`.

Shapes: N rows, V vocabulary, G groups of 64 tokens, C listed tokens, K leaders of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.kernels.triton_noise import listed_kernel, peaks_kernel, weights_kernel
from outrider.sampling.noise import GROUP, log_table, ratio_table, row_keys
from outrider.sampling.perturbed import Leaders
from outrider.sampling.processors import SamplingRow
from outrider.sampling.truncation import BatchTruncation, listing, nucleus_only, truncates, with_whole

LISTED = 1024
UNKNOWN = -1
GROUPS_PER_PROGRAM = 16
TOKENS_PER_PROGRAM = 256
WEIGHED_PER_PROGRAM = 1024


def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The target's token at each row, or UNKNOWN: logits [N, V] float32."""
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        tokens: list[int] = chosen(logits, rows).tolist()
    return tokens


def chosen(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The same [N], still on the device: nothing has waited for it."""
    sampled = [row for row in rows if not row.params.greedy]
    cut = [row for row in sampled if truncates(row.params)]
    tokens = logits.argmax(-1)
    if sampled:
        draws = upload(rows, [1.0] * len(rows), logits)
        if len(cut) < len(sampled):
            tokens = torch.where(draws.greedy, tokens, best_tokens(logits, draws))
        if cut:
            found, complete = _listed_leaders(logits, draws, cut, 1)
            decided = found.tokens[:, 0].masked_fill(~complete, UNKNOWN)
            tokens = torch.where(draws.cut, decided, tokens)
    return tokens


class Ranks(NamedTuple):
    """What a ranking is to be, from the chooser."""

    rivals: int
    """K, at least 1."""
    flatness: float
    winners: Callable[[Leaders, Tensor], Tensor]
    """The leader [N, grid] that each sharpness of the grid would put first, from the slopes [N, 1]."""


class BatchRanking(NamedTuple):
    """What a ranking is made of, read at once."""

    tokens: list[list[int]]
    """[N, K], best first."""
    scores: list[list[float]]
    """[N, K]; -inf where truncation left fewer."""
    shares: list[list[float]]
    """[N, K] confidences: probabilities of greedy rows, shares of the leaders' weight of others."""
    winners: list[list[int]]
    """[N, grid] tokens; meaningless for greedy rows."""


def rank(
    logits: Tensor, rows: Sequence[SamplingRow], slopes: Sequence[float], settings: Ranks
) -> BatchRanking:
    """Each row's leaders: logits [N, V] float32.

    Of a truncated row with a longer list, only the list is looked at: a guess may miss what it has not seen.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        parts = _ranked(logits, rows, slopes, settings)
        read = torch.cat(parts, 1).cpu()  # token ids are exact in float64
    tokens, scores, shares, winners = torch.split(read, [part.shape[1] for part in parts], 1)
    return BatchRanking(tokens.long().tolist(), scores.tolist(), shares.tolist(), winners.long().tolist())


def _ranked(
    logits: Tensor, rows: Sequence[SamplingRow], slopes: Sequence[float], settings: Ranks
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, scores and shares [N, K] and winners [N, grid], all float64."""
    draws = upload(rows, slopes, logits)
    sampled = [row for row in rows if not row.params.greedy]
    cut = [row for row in sampled if truncates(row.params)]
    best = logits.topk(settings.rivals)
    found = Leaders(best.indices, best.values.double(), torch.zeros_like(best.values, dtype=torch.float64))
    shares = (best.values - logits.logsumexp(-1, keepdim=True)).exp().double()
    if sampled:
        if len(cut) < len(sampled):
            found = _where(draws.greedy, found, leaders(logits, draws, settings.rivals))
        if cut:
            found = _where(draws.cut, _listed_leaders(logits, draws, cut, settings.rivals)[0], found)
        sharpened = (found.scores / (settings.flatness / draws.limits.temperature.clamp(max=1.0))).softmax(-1)
        shares = torch.where(draws.greedy[:, None], shares, sharpened)
    slope = draws.scale[:, None] * draws.limits.temperature.double()
    winners = settings.winners(found, slope)
    return found.tokens.double(), found.scores, shares, winners.double()


def _where(chosen: Tensor, yes: Leaders, no: Leaders) -> Leaders:
    """Rows of one or of the other, by `chosen` [N]."""
    return Leaders(*(torch.where(chosen[:, None], a, b) for a, b in zip(yes, no, strict=True)))


class Draws(NamedTuple):
    """What the rows' noise and truncation depend on, on the device."""

    keys: Tensor
    """[N, 2] int64"""
    scale: Tensor
    """[N] float64, slope / temperature; 1 for greedy rows."""
    limits: BatchTruncation
    greedy: Tensor
    """[N] bool"""
    cut: Tensor
    """[N] bool, truncated."""


def upload(rows: Sequence[SamplingRow], slopes: Sequence[float], logits: Tensor) -> Draws:
    """One copy to the device of the logits [N, V]."""
    size, count = logits.shape[1], len(rows)
    params = [row.params for row in rows]
    table = torch.empty((8, count), dtype=torch.int64, pin_memory=logits.is_cuda)
    floats = table.view(torch.float64)
    table[:2] = row_keys([p.seed for p in params], [row.position for row in rows]).T
    heats = [1.0 if p.greedy else p.temperature for p in params]
    floats[2] = torch.tensor([s / t for s, t in zip(slopes, heats, strict=True)], dtype=torch.float64)
    floats[3] = torch.tensor(heats, dtype=torch.float64)
    table[4] = torch.tensor([p.top_k if 0 < p.top_k < size else size for p in params])
    floats[5] = torch.tensor([p.top_p if p.top_p < 1.0 else math.inf for p in params], dtype=torch.float64)
    floats[6] = torch.tensor(
        [math.log(p.min_p) if p.min_p else -math.inf for p in params], dtype=torch.float64
    )
    table[7] = torch.tensor([p.greedy + 2 * (not p.greedy and truncates(p)) for p in params])
    there = table.to(logits.device, non_blocking=True)
    numbers = there.view(torch.float64)
    limits = BatchTruncation(
        numbers[3].float()[:, None],
        there[4][:, None],
        numbers[5][:, None],
        numbers[6][:, None],
        there[4][:, None],
    )
    return Draws(there[:2].T.contiguous(), numbers[2], limits, there[7] == 1, there[7] == 2)


def best_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """The token [N] with the highest score of each row."""
    best, tokens = _peaks(logits, draws)
    return tokens.gather(1, best.argmax(-1, keepdim=True))[:, 0]


def leaders(logits: Tensor, draws: Draws, count: int) -> Leaders:
    """The `count` leaders of each row over the vocabulary, all exact."""
    best, _ = _peaks(logits, draws)
    groups = best.topk(min(count, best.shape[1])).indices  # [N, K]: the leaders are in these
    tokens = (groups[..., None] * GROUP + torch.arange(GROUP, device=logits.device)).flatten(1)
    inside = tokens < logits.shape[1]
    tokens = tokens.clamp(max=logits.shape[1] - 1)
    return _top(tokens, logits.gather(1, tokens).masked_fill(~inside, -torch.inf), draws, count)


def _peaks(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """The best score of each group [N, G], and its token."""
    rows, size = logits.shape
    groups = -(-size // GROUP)
    best = torch.empty((rows, groups), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, groups), dtype=torch.int64, device=logits.device)
    peaks_kernel[(rows, -(-groups // GROUPS_PER_PROGRAM))](
        logits,
        draws.scale,
        draws.keys,
        _tables(logits.device),
        best,
        tokens,
        logits.stride(0),
        size,
        groups,
        BLOCK=GROUPS_PER_PROGRAM,
        enable_fp_fusion=False,
    )
    return best, tokens


def _listed_leaders(
    logits: Tensor, draws: Draws, cut: Sequence[SamplingRow], count: int
) -> tuple[Leaders, Tensor]:
    """Leaders among what truncation leaves, and where [N] that is all of it; `cut` are the truncated rows."""
    size = logits.shape[1]
    largest = max((row.params.top_k for row in cut if row.params.top_k < size), default=0)
    whole = _whole(logits, draws) if any(nucleus_only(row.params, size) for row in cut) else None
    limits = with_whole(draws.limits, whole, size)
    found = listing(logits, limits, min(max(LISTED, largest + 1), size))
    left = found.logits.masked_fill(~found.stays, -torch.inf)
    return _top(found.tokens, left, draws, count), found.complete


def _whole(logits: Tensor, draws: Draws) -> Tensor:
    """The weight [N, 1] of all tokens of each row."""
    rows, size = logits.shape
    whole = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    weights_kernel[(rows, -(-size // WEIGHED_PER_PROGRAM))](
        logits,
        logits.amax(-1),
        draws.limits.temperature,
        whole,
        logits.stride(0),
        size,
        BLOCK=WEIGHED_PER_PROGRAM,
        enable_fp_fusion=False,
    )
    return whole[:, None]


def _top(tokens: Tensor, logits: Tensor, draws: Draws, count: int) -> Leaders:
    """Leaders among each row's own tokens: tokens and logits [N, C]."""
    scores, noise = score(tokens, logits, draws.scale, draws.keys)
    top = scores.topk(min(count, scores.shape[1]))
    return Leaders(tokens.gather(1, top.indices), top.values, noise.gather(1, top.indices))


def score(tokens: Tensor, logits: Tensor, scale: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and noise [N, C] float64 of each row's own tokens: tokens [N, C], logits [N, C] float32."""
    rows, count = tokens.shape
    scores, noise = torch.empty((2, rows, count), dtype=torch.float64, device=logits.device)
    listed_kernel[(rows, -(-count // TOKENS_PER_PROGRAM))](
        tokens.contiguous(),
        logits.contiguous(),
        scale,
        keys,
        _tables(logits.device),
        scores,
        noise,
        count,
        BLOCK=TOKENS_PER_PROGRAM,
        enable_fp_fusion=False,
    )
    return scores, noise


@cache
def _tables(device: torch.device) -> Tensor:
    """The tables of the noise with their steps: [4, cells] int64."""
    parts = [part for table in (ratio_table(), log_table()) for part in (table[:-1], np.diff(table))]
    with torch.inference_mode(False):  # or they could not be used outside of it
        return torch.tensor(np.array(parts, dtype=np.int64), device=device)
