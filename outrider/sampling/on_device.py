"""Computes the choices and rankings of `outrider.sampling.chooser` on a GPU, with one wait for the result.

    upload    keys and parameters of all rows, in one pinned copy that nothing waits for
    launch    scores, truncation and arg-max of all rows, while the forward may still run
    read      one small table

A ranking is captured and replayed as one launch (`replays`).

The logits are those after penalties, biases and masks. For a truncated row, only the highest LISTED tokens
are examined. If more could stay, which is known only on the device, the result is UNKNOWN, and the row's
token is chosen in a slower way.

Kernels are launched on the thread's current device, so `device_of` sets it.

Shapes: N rows, V vocabulary, G groups of 64 tokens, C listed tokens, K leaders of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.gpu.graphs import CudaGraphs
from outrider.sampling.kernels.triton_noise import listed_kernel, peaks_kernel, weights_kernel
from outrider.sampling.noise import GROUP, log_table, ratio_table, row_key_pairs
from outrider.sampling.perturbed import Leaders, would_win
from outrider.sampling.processors import NO_TOKEN, SamplingRow, comparable
from outrider.sampling.replays import Replays
from outrider.sampling.top import most_likely, top
from outrider.sampling.truncation import BatchTruncation, listing, nucleus_only, truncates, with_whole
from outrider.speculation.acceptance import FLATNESS

LISTED = 1024
"""Highest tokens of a truncated row that are examined."""
UNKNOWN = -1
"""The result of a row that may keep more tokens than the listed ones."""
GROUPS_PER_PROGRAM, TOKENS_PER_PROGRAM, WEIGHED_PER_PROGRAM = 16, 256, 1024
"""Groups, listed tokens, and tokens to weigh that one program of a kernel takes."""


def choose(given: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The target's token at each row, UNKNOWN, or NO_TOKEN where the model has no number for it.

    `given` [N, V] are the model's logits, `logits` [N, V] float32 those after penalties, biases and masks.
    """
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        found = chosen(comparable(logits), rows)
        sound = given.gather(1, found.clamp(min=0)[:, None])[:, 0] > -torch.inf
        tokens, numbers = torch.stack((found, sound)).tolist()
    return [
        token if number or token == UNKNOWN else NO_TOKEN
        for token, number in zip(tokens, numbers, strict=True)
    ]


def chosen(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The tokens of `choose` as a tensor [N] that is still on the device, without a wait."""
    kinds = Kinds.of(rows, logits.shape[1])
    if not (kinds.whole or kinds.cut):
        return logits.argmax(-1)
    draws = upload(rows, [1.0] * len(rows), logits)
    found: Tensor | None = logits.argmax(-1) if kinds.greedy else None
    if kinds.whole:
        best = best_tokens(logits, draws)
        found = best if found is None else torch.where(draws.greedy, found, best)
    if kinds.cut:
        listed, complete = _listed_leaders(logits, draws, kinds, 1)
        decided = listed.tokens[:, 0].masked_fill(~complete, UNKNOWN)
        found = decided if found is None else torch.where(draws.cut, decided, found)
    assert found is not None, "every row is of a kind"
    return found


class Kinds(NamedTuple):
    """The kinds of rows that a batch has; results that no row needs are not computed."""

    greedy: bool
    whole: bool
    """Whether there are sampled rows without truncation."""
    cut: bool
    """Whether there are truncated rows."""
    nucleus: bool
    """Whether there are truncated rows whose top-p is over the whole vocabulary."""
    listed: int
    """C of the truncated rows; 0 if there are none."""

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], size: int) -> Kinds:
        """The kinds of some rows, for a vocabulary of `size` tokens."""
        sampled = [row.params for row in rows if not row.params.greedy]
        cut = [params for params in sampled if truncates(params)]
        largest = max((params.top_k for params in cut if params.top_k < size), default=0)
        return cls(
            len(sampled) < len(rows),
            len(cut) < len(sampled),
            bool(cut),
            any(nucleus_only(params, size) for params in cut),
            min(max(LISTED, largest + 1), size) if cut else 0,
        )


class BatchRanking(NamedTuple):
    """The data of a ranking, which one read brings."""

    tokens: list[list[int]]
    """[N, K], best first."""
    scores: list[list[float]]
    """[N, K]; -inf for missing leaders, where truncation left fewer."""
    shares: list[list[float]]
    """[N, K] confidences: probabilities for greedy rows, shares of the leaders' weight for others."""
    winners: list[list[int]]
    """[N, grid] tokens; meaningless for greedy rows, and [N, 0] if there are only such."""


def rank(logits: Tensor, rows: Sequence[SamplingRow], slopes: Sequence[float], leading: int) -> BatchRanking:
    """The `leading` leaders of each row, from logits [N, V] float32.

    For a truncated row, only the list is examined, even if more tokens could stay: a draft's guess need not
    be exact.
    """
    size = logits.shape[1]
    kinds = Kinds.of(rows, size)

    def table_of(count: int) -> Tensor:
        """The table of the rows, padded with the last row; empty if all are greedy: nothing reads it then."""
        if not (kinds.whole or kinds.cut):
            return torch.empty(0, dtype=torch.int64)
        more = count - len(rows)
        return draw_table([*rows, *[rows[-1]] * more], [*slopes, *[slopes[-1]] * more], logits)

    def calculate(logits: Tensor, table: Tensor) -> Tensor:
        return _ranked(logits, table, kinds, leading)

    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        replays = _replays(logits.device, size) if kinds.listed <= LISTED else None
        read = None if replays is None else replays.run((kinds, leading), logits, table_of, calculate)
        if read is None:
            table = table_of(len(rows)).to(logits.device, non_blocking=True)
            read = calculate(logits, table).cpu()
    tokens, scores, shares, winners = torch.split(read, [*[leading] * 3, read.shape[1] - 3 * leading], 1)
    return BatchRanking(tokens.long().tolist(), scores.tolist(), shares.tolist(), winners.long().tolist())


@cache
def _replays(device: torch.device, size: int) -> Replays | None:
    """The graphs for rankings of a vocabulary of `size` tokens; None if kernels are interpreted."""
    return Replays(CudaGraphs(device), size, device) if device.type == "cuda" else None


def _ranked(logits: Tensor, table: Tensor, kinds: Kinds, leading: int) -> Tensor:
    """Tokens, scores and shares [N, K] and winners [N, grid] side by side, in float64, which holds token ids
    exactly."""
    logits = comparable(logits)
    if not (kinds.whole or kinds.cut):
        return torch.cat([part.double() for part in most_likely(logits, leading)], 1)
    draws = draws_of(table)
    found, shares = _sampled_leaders(logits, draws, kinds, leading)
    if kinds.greedy:
        tokens, scores, likely = most_likely(logits, leading)
        best = Leaders(tokens, scores.double(), torch.zeros_like(scores, dtype=torch.float64))
        found = _where(draws.greedy, best, found)
        shares = torch.where(draws.greedy[:, None], likely.double(), shares)
    slope = draws.scale[:, None] * draws.limits.temperature.double()
    winners = would_win(found, slope)
    return torch.cat([found.tokens.double(), found.scores, shares, winners.double()], 1)


def _sampled_leaders(logits: Tensor, draws: Draws, kinds: Kinds, leading: int) -> tuple[Leaders, Tensor]:
    """Leaders with the noise, and their shares [N, K]; meaningless for greedy rows."""
    found = leaders(logits, draws, leading) if kinds.whole else None
    if kinds.cut:
        listed, _ = _listed_leaders(logits, draws, kinds, leading)
        found = listed if found is None else _where(draws.cut, listed, found)
    assert found is not None, "there are sampled rows"
    flatness = FLATNESS / draws.limits.temperature.clamp(max=1.0)
    return found, (found.scores / flatness).softmax(-1)


def _where(chosen: Tensor, yes: Leaders, no: Leaders) -> Leaders:
    """Rows of `yes` where `chosen` [N] is true, otherwise rows of `no`."""
    return Leaders(*(torch.where(chosen[:, None], a, b) for a, b in zip(yes, no, strict=True)))


class Draws(NamedTuple):
    """The rows' keys and parameters for noise and truncation, on the device."""

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
    """Copy the draws of some rows, in one copy, to the device of the logits [N, V]."""
    return draws_of(draw_table(rows, slopes, logits).to(logits.device, non_blocking=True))


def draw_table(rows: Sequence[SamplingRow], slopes: Sequence[float], logits: Tensor) -> Tensor:
    """The table that `draws_of` reads, for rows of logits [N, V]: [8, rows] int64 on the host, pinned for a
    GPU."""
    size = logits.shape[1]
    params = [row.params for row in rows]
    heats = [1.0 if p.greedy else p.temperature for p in params]
    table = np.empty((8, len(rows)), dtype=np.int64)
    floats = table.view(np.float64)
    table[:2] = np.array(row_key_pairs([p.seed for p in params], [row.position for row in rows])).T
    floats[2] = [slope / heat for slope, heat in zip(slopes, heats, strict=True)]
    floats[3] = heats
    table[4] = [p.top_k if 0 < p.top_k < size else size for p in params]
    floats[5] = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
    floats[6] = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    table[7] = [p.greedy + 2 * (not p.greedy and truncates(p)) for p in params]
    copied = torch.from_numpy(table)
    return copied.pin_memory() if logits.is_cuda else copied


def draws_of(table: Tensor) -> Draws:
    """The draws in a table that is on the device."""
    numbers = table.view(torch.float64)
    limits = BatchTruncation(
        numbers[3].float()[:, None],
        table[4][:, None],
        numbers[5][:, None],
        numbers[6][:, None],
        table[4][:, None],  # `with_whole` replaces it
    )
    return Draws(table[:2].T.contiguous(), numbers[2], limits, table[7] == 1, table[7] == 2)


def best_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """The token [N] with the highest score of each row."""
    best, tokens = _peaks(logits, draws)
    return tokens.gather(1, best.argmax(-1, keepdim=True))[:, 0]


def leaders(logits: Tensor, draws: Draws, count: int) -> Leaders:
    """The exact `count` leaders of each row over the whole vocabulary."""
    best, _ = _peaks(logits, draws)
    groups = top(best, min(count, best.shape[1]))  # [N, K]: the leaders are in these
    tokens = groups.columns[..., None] * GROUP + torch.arange(GROUP, device=logits.device)
    # Where fewer groups have a token, others are named again.
    outside = (tokens >= logits.shape[1]) | (groups.values == -torch.inf)[..., None]
    tokens = tokens.flatten(1).clamp(max=logits.shape[1] - 1)
    values = logits.gather(1, tokens).masked_fill(outside.flatten(1), -torch.inf)
    return _top(tokens, values, draws, count)


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


def _listed_leaders(logits: Tensor, draws: Draws, kinds: Kinds, count: int) -> tuple[Leaders, Tensor]:
    """Leaders among the listed tokens that truncation keeps, and whether [N] these are all that it keeps."""
    whole = _whole(logits, draws) if kinds.nucleus else None
    found = listing(logits, with_whole(draws.limits, whole, logits.shape[1]), kinds.listed)
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
    found = top(scores, min(count, scores.shape[1]))
    return Leaders(tokens.gather(1, found.columns), found.values, noise.gather(1, found.columns))


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
    with torch.inference_mode(False):  # otherwise the tables could not be used outside of that mode
        return torch.tensor(np.array(parts, dtype=np.int64), device=device)
