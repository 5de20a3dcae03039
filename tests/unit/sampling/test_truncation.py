"""top-k, top-p and min-p, against transformers."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.protocol.messages import SamplingParams
from outrider.sampling.truncation import kept, weights

SETTINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.5, 1.0, 1.7), (0, 1, 40, 5000), (1.0, 0.9, 0.3), (0.0, 0.05)
    )
    if top_k or top_p < 1.0 or min_p
]


def transformers_mask(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which tokens [V] transformers keeps of one row."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return ~scores[0].isneginf()


def our_masks(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Which tokens [N, V] we keep."""
    masks = torch.zeros_like(logits, dtype=torch.bool)
    for part in kept(logits, params):
        masks[part.rows] = masks[part.rows].scatter(1, part.tokens, ~part.logits.isneginf())
    return masks


def random_logits(rows: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Logits [N, V] without ties."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * spread


@pytest.mark.parametrize("vocabulary", [7, 130, 3000])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_keeps_what_transformers_keeps(vocabulary: int, spread: float) -> None:
    """Every combination of settings, all rows in one call, from lists of one token to nearly all."""
    logits = random_logits(len(SETTINGS), vocabulary, spread)
    found = our_masks(logits, SETTINGS)
    for index, params in enumerate(SETTINGS):
        assert torch.equal(found[index], transformers_mask(logits[index], params)), params


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.55),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
    ],
)
def test_ties_are_cut_as_transformers_cuts_them(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coarse logits, as bfloat16 models give, tie at every edge; both zeros are one.

    With torch's default sort it is arbitrary which of the equal tokens at its edge the nucleus of
    transformers keeps; with a stable sort it is those with the highest ids.
    """
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    logits = (random_logits(40, 300, 2.0) * 2).round() / 2
    logits[logits == 0] = torch.tensor([0.0, -0.0]).repeat(len(logits) * 300)[: int((logits == 0).sum())]
    found = our_masks(logits, [params] * 40)
    for index in range(40):
        assert torch.equal(found[index], transformers_mask(logits[index], params)), index


def test_masked_tokens_stay_out() -> None:
    """A token at -inf is never kept, even when top-k is wider than what is left."""
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [5, 7]] = 1.0
    (part,) = kept(logits, [SamplingParams(temperature=1.0, top_k=10)])
    assert part.tokens.tolist() == [[7, 5]]


def test_lists_are_as_short_as_what_stays() -> None:
    """Rows that keep few tokens are not widened by a row that keeps many."""
    logits = random_logits(2, 5000, 1.0)
    params = [SamplingParams(temperature=1.0, top_k=5), SamplingParams(temperature=1.0, top_p=0.99)]
    short, long = kept(logits, params)
    assert (short.rows.tolist(), short.tokens.shape) == ([0], (1, 5))
    assert long.rows.tolist() == [1]
    assert long.tokens.shape[1] > 1000


def test_weights_are_exponentials() -> None:
    """2^40 for the most likely token, to nine digits where they are large, and nothing far below."""
    exponents = torch.linspace(-10.0, 0.0, 20_001, dtype=torch.float64)
    exact = exponents.exp() * 2.0**40
    assert ((weights(exponents) - exact).abs() <= 6e-9 * exact + 1.0).all()
    assert weights(torch.tensor([0.0, -0.0, -27.0], dtype=torch.float64)).tolist() == [2**40, 2**40, 2]
    assert not weights(torch.tensor([-28.0, -43.0, -1e9, -torch.inf], dtype=torch.float64)).any()
