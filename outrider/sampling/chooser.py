"""The target's choice at each row, and the draft's ranking of what that choice will be.

    choice = argmax over tokens v of   logit(v) / temperature + noise(seed, position, v)

over the tokens that truncation leaves, with the logits after penalties, biases and masks. This is an
exact sample (Gumbel-max), and depends only on logits, parameters, seed and position. A greedy row is the
plain argmax. The draft knows the noise too, so it ranks its own tokens by
`sharpness x logit / temperature + noise`.

Compiled kernels compute this on the CPU (`compiled`), others on a GPU (`on_device`). Where there are none,
torch operations do, which define the result.

Shapes: N rows, V vocabulary, K ranked tokens of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from outrider.engine.cpu.kernels.compiling import available
from outrider.engine.gpu.accelerator import has_kernels, kernel_errors
from outrider.protocol.messages import TokenLogprob
from outrider.sampling.noise import row_keys
from outrider.sampling.perturbed import Leaders, leaders, leaders_among, would_win
from outrider.sampling.processors import NO_TOKEN, SamplingRow, comparable, processed
from outrider.sampling.truncation import kept, truncates
from outrider.speculation.acceptance import FLATNESS, bucket

__all__ = ["NO_TOKEN", "Ranking", "SamplingRow", "choose", "logprobs", "prepare", "rank"]

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_WITHOUT: set[torch.device] = set()
"""Devices for which a kernel of choices or rankings does not compile, though others do."""
_RIVALS = 8
"""Least number of leaders among which a sampled token's share, its confidence, is computed."""


class Ranking(NamedTuple):
    """The draft's best guesses of the target's choice at one row, best first."""

    tokens: list[int]
    """The tokens: as many as asked for, or fewer if truncation left fewer."""
    buckets: list[int]
    """Per token, the bucket of `outrider.speculation.acceptance` for its estimate."""
    winners: tuple[int, ...] = ()
    """Per sharpness of SHARPNESS_GRID, the token that it would put first; empty for greedy rows."""


def prepare() -> None:
    """Compile the kernels, so that the first request does not wait for it."""
    if available():
        from outrider.sampling import compiled  # noqa: F401


def choose(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> list[int]:
    """The target's token at each row, or NO_TOKEN: logits [N, V] float32."""
    given, logits = logits, processed(logits, rows, eos_token_ids)
    chosen = _on_kernels(logits.device, partial(_choose_on_device, given, logits, rows))
    if chosen is not None:
        return chosen
    if not _compiled_for(logits):
        return _with_numbers(given, _choose_in_torch(logits, rows))
    from outrider.sampling import compiled  # needs numba, which is there

    return _with_numbers(given, compiled.choose(logits, rows))


def _on_kernels(device: torch.device, compute: Callable[[], _Result]) -> _Result | None:
    """The result of a device's kernels; None if there are none, now or ever, because one does not compile."""
    if not has_kernels(device) or device in _WITHOUT:
        return None
    try:
        return compute()
    except kernel_errors() as error:
        log.warning("choices and rankings run without kernels: one does not compile (%s)", error)
        _WITHOUT.add(device)
        return None


def _with_numbers(logits: Tensor, tokens: Sequence[int]) -> list[int]:
    """The tokens, with NO_TOKEN where a row of the model's logits [N, V] has no number for its token."""
    places = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    sound = (logits.gather(1, places)[:, 0] > -torch.inf).tolist()
    return [token if number else NO_TOKEN for token, number in zip(tokens, sound, strict=True)]


def _compiled_for(logits: Tensor) -> bool:
    """True if the CPU's kernels can process these logits."""
    return logits.dtype is torch.float32 and logits.device.type == "cpu" and available()


def _choose_on_device(given: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Choose on a GPU with one wait for it, or more if the truncation of a row keeps very many tokens.

    `given` are the model's logits, `logits` those after penalties, biases and masks.
    """
    from outrider.sampling import on_device  # needs Triton, which is there

    tokens = on_device.choose(given, logits, rows)
    unknown = [index for index, token in enumerate(tokens) if token == on_device.UNKNOWN]
    if unknown:
        found = _choose_in_torch(logits[unknown], [rows[index] for index in unknown])
        found = _with_numbers(given[unknown], found)
        for index, token in zip(unknown, found, strict=True):
            tokens[index] = token
    return tokens


def _choose_in_torch(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    logits = comparable(logits)
    greedy, sampled = _split(rows)
    if not sampled:
        return logits.argmax(-1).tolist()
    tokens = [0] * len(rows)
    for indices, found in _sampled_leaders(logits, rows, sampled, [1.0] * len(rows), 1):
        for index, token in zip(indices, found.tokens[:, 0].tolist(), strict=True):
            tokens[index] = token
    if greedy:
        for index, token in zip(greedy, logits[greedy].argmax(-1).tolist(), strict=True):
            tokens[index] = token
    return tokens


def rank(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    count: int,
    sharpness: float | Sequence[float],
    eos_token_ids: Collection[int],
) -> list[Ranking]:
    """For each row, the `count` likeliest choices of the target, from the draft's logits [N, V] float32."""
    count = min(count, logits.shape[1])
    slopes = [sharpness] * len(rows) if isinstance(sharpness, (int, float)) else sharpness
    logits = processed(logits, rows, eos_token_ids)
    rivals = min(max(count, _RIVALS), logits.shape[1])
    asked = logits, rows, slopes, rivals, count
    ranked = _on_kernels(logits.device, partial(_rank_on_device, *asked)) if rows else None
    if ranked is not None:
        return ranked
    if not _compiled_for(logits):
        return _rank_in_torch(*asked)
    from outrider.sampling import compiled  # needs numba, which is there

    return compiled.rank(*asked)


def _rank_in_torch(
    logits: Tensor, rows: Sequence[SamplingRow], slopes: Sequence[float], rivals: int, count: int
) -> list[Ranking]:
    """The best `count` of `rivals` leaders of each row; see `rank`."""
    logits = comparable(logits)
    greedy, sampled = _split(rows)
    rankings = dict(zip(greedy, _rank_greedy(logits[greedy], count), strict=True)) if greedy else {}
    for indices, found in _sampled_leaders(logits, rows, sampled, slopes, rivals):
        temperatures = [rows[index].params.temperature for index in indices]
        ranked = _rank_sampled(found, [slopes[index] for index in indices], temperatures, count)
        rankings.update(zip(indices, ranked, strict=True))
    return [rankings[index] for index in range(len(rows))]


def _rank_on_device(
    logits: Tensor, rows: Sequence[SamplingRow], slopes: Sequence[float], rivals: int, count: int
) -> list[Ranking]:
    from outrider.sampling import on_device  # needs Triton, which is there

    ranked = on_device.rank(logits, rows, slopes, rivals)
    rankings = []
    for row, tokens, scores, shares, winners in zip(rows, *ranked, strict=True):
        greedy = row.params.greedy
        left = min(count, len(scores) - scores.count(-torch.inf))
        buckets = [bucket(share, greedy=greedy) for share in shares[:left]]
        rankings.append(Ranking(tokens[:left], buckets, () if greedy else tuple(winners)))
    return rankings


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log probability of each row's token, and the `count` best tokens, from unprocessed logits [N, V]."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = scores.topk(min(count, logits.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens, chosen, tops, strict=True)
    ]


def _split(rows: Sequence[SamplingRow]) -> tuple[list[int], list[int]]:
    """Indices of the greedy rows and of the sampled ones."""
    greedy = [index for index, row in enumerate(rows) if row.params.greedy]
    sampled = [index for index, row in enumerate(rows) if not row.params.greedy]
    return greedy, sampled


def _sampled_leaders(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    sampled: Sequence[int],
    slopes: Sequence[float],
    count: int,
) -> Iterator[tuple[list[int], Leaders]]:
    """Yield the leaders of the sampled rows in parts, each with the indices of its rows."""
    whole = [index for index in sampled if not truncates(rows[index].params)]
    if whole:
        keys, scale = _draws(rows, slopes, whole, logits.device)
        yield whole, leaders(_part(logits, whole), scale, keys, count)
    cut = [index for index in sampled if truncates(rows[index].params)]
    for left in kept(_part(logits, cut), [rows[index].params for index in cut]) if cut else ():
        indices = [cut[place] for place in left.rows.tolist()]
        keys, scale = _draws(rows, slopes, indices, logits.device)
        yield indices, leaders_among(left.tokens, left.logits, scale, keys, count)


def _part(logits: Tensor, indices: Sequence[int]) -> Tensor:
    """Some rows, in order; without a copy if these are all rows."""
    return logits if len(indices) == len(logits) else logits[indices]


def _draws(
    rows: Sequence[SamplingRow], slopes: Sequence[float], indices: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Noise keys [n, 2] and the factor of the logits [n] of some rows."""
    seeds = [rows[index].params.seed for index in indices]
    keys = row_keys(seeds, [rows[index].position for index in indices], device)
    factors = [slopes[index] / rows[index].params.temperature for index in indices]
    return keys, torch.tensor(factors, dtype=torch.float64, device=device)


def _rank_greedy(logits: Tensor, count: int) -> list[Ranking]:
    """Rank greedy rows by logit; the confidence is the draft's probability."""
    best = logits.topk(count)
    confidences = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
    return [
        Ranking(tokens, [bucket(confidence, greedy=True) for confidence in row])
        for tokens, row in zip(best.indices.tolist(), confidences.tolist(), strict=True)
    ]


def _rank_sampled(
    found: Leaders, slopes: Sequence[float], temperatures: list[float], count: int
) -> list[Ranking]:
    """Rank sampled rows by score; the confidence is a token's share of exp(score / flatness) among leaders.

    The noise is known, so the draft's probability by itself says little. What matters is the distance to the
    rivals' scores, relative to the draft's error, which a low temperature magnifies. On a trained pair this
    share predicted acceptance about as well as any other feature tried (margin to the best rival, entropy,
    draft probability, pairs of them), and was nearly calibrated without learning.
    """
    flatness = torch.tensor([FLATNESS / min(temperature, 1.0) for temperature in temperatures])
    shares = (found.scores / flatness.to(found.scores)[:, None]).softmax(-1)
    own = torch.tensor(slopes, dtype=torch.float64, device=found.scores.device)
    rankings = []
    for tokens, scores, row_shares, winners in zip(
        found.tokens[:, :count].tolist(),
        found.scores[:, :count].tolist(),
        shares.tolist(),
        would_win(found, own[:, None]).tolist(),
        strict=True,
    ):
        left = len(scores) - scores.count(-torch.inf)
        buckets = [bucket(share, greedy=False) for share in row_shares[:left]]
        rankings.append(Ranking(tokens[:left], buckets, tuple(winners)))
    return rankings
