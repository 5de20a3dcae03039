"""A chosen token is an exact sample of the processed distribution: G-tests over 10^6 draws in all.

Seeds are fixed, so a test passes or fails for good; a correct sampler fails one in 10^4.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import power_divergence
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import choose
from outrider.sampling.history import History
from outrider.sampling.processors import SamplingRow, processed

SMALLEST_P = 1e-4
CALL = 25_000
"""Rows in one call."""

CASES = {
    "plain": (SamplingParams(temperature=1.0), 16, 300_000),
    "cold": (SamplingParams(temperature=0.4), 16, 100_000),
    "many groups": (SamplingParams(temperature=1.5), 400, 150_000),
    "top-p": (SamplingParams(temperature=0.7, top_p=0.9), 16, 150_000),
    "top-k and penalties": (
        SamplingParams(
            temperature=1.0, top_k=9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
        ),
        16,
        150_000,
    ),
    "min-p and bias": (
        SamplingParams(temperature=1.3, min_p=0.05, logit_bias={3: 1.5, 0: -2.0}),
        16,
        150_000,
    ),
}
ALL_COUNTERS = ("plain", "top-k and penalties")
COUNTED = [
    pytest.param(counter, name, marks=() if counter == "seed" or name in ALL_COUNTERS else pytest.mark.slow)
    for counter in ("seed", "position")
    for name in CASES
]
"""What is done to scores does not depend on where the noise comes from."""


def exact_distribution(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Probabilities [V] by transformers' warpers in float64, after our penalties (tested elsewhere)."""
    params = row.params
    scores = processed(logits[None], [row], []).double() / params.temperature
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores[0].softmax(-1)


def drawn_counts(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """How often each token [V] was chosen."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for start in range(0, len(rows), CALL):
        part = rows[start : start + CALL]
        chosen = choose(logits.expand(len(part), -1), part, [])
        counts += torch.tensor(chosen).bincount(minlength=len(logits))
    return counts


def g_test(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of the likelihood-ratio test; rare tokens are pooled, impossible ones must not occur."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    rare = expected < 10
    observed = torch.cat([counts[~rare].double(), counts[rare].sum(0, keepdim=True).double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    known = wanted > 0
    return float(power_divergence(observed[known], wanted[known], lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize(("counter", "name"), COUNTED)
def test_choices_follow_the_exact_distribution(name: str, counter: str) -> None:
    """Over many seeds at one position, and over many positions with one seed."""
    params, vocabulary, draws = CASES[name]
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 1.5
    history = History([1, 2, 2], [3, 3, 4]).extended([4, 5])
    if counter == "seed":
        rows = [SamplingRow(replace(params, seed=seed), 7, 5, history) for seed in range(draws // 2)]
    else:
        rows = [SamplingRow(replace(params, seed=42), position, 5, history) for position in range(draws // 2)]
    probabilities = exact_distribution(logits, rows[0])
    assert g_test(drawn_counts(logits, rows), probabilities) > SMALLEST_P


def test_pairs_of_tokens_follow_the_product_distribution() -> None:
    """Two positions of one seed are independent: a G-test over pairs of tokens."""
    logits = torch.tensor([1.0, 0.0, -0.5, 0.3, -2.0])
    draws = 40_000
    rows = [
        SamplingRow(SamplingParams(temperature=1.0, seed=seed), position, 0, History([]))
        for seed in range(draws)
        for position in (3, 4)
    ]
    chosen = torch.tensor(choose(logits.expand(len(rows), -1), rows, [])).view(draws, 2)
    counts = (chosen[:, 0] * 5 + chosen[:, 1]).bincount(minlength=25)
    probabilities = logits.double().softmax(-1)
    assert g_test(counts, torch.outer(probabilities, probabilities).flatten()) > SMALLEST_P
