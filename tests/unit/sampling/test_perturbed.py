"""Pruning never changes the result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.noise import gumbel_rows, row_keys
from outrider.sampling.perturbed import leaders, leaders_among


def dense_scores(logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """All scores [N, V], every noise drawn."""
    noise = gumbel_rows(keys, torch.arange(logits.shape[1]).expand(len(logits), -1))
    return logits.double() * scale[:, None] + noise


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 5, 63, 64, 65, 300, 4096]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    factor=st.sampled_from([0.01, 1.0, 50.0]),
    sure=st.integers(1, 6),
    seed=st.integers(0, 2**64 - 1),
)
def test_leaders_equal_those_of_all_scores(
    vocabulary: int, spread: float, factor: float, sure: int, seed: int
) -> None:
    """The pruned search finds the same tokens and scores as drawing every noise."""
    sure = min(sure, vocabulary)
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(seed % 2**63)) * spread
    scale = torch.full((5,), factor, dtype=torch.float64)
    keys = row_keys([seed] * 5, range(5))
    found = leaders(logits, scale, keys, sure)
    expected = dense_scores(logits, scale, keys).topk(sure)
    assert torch.equal(found.scores, expected.values)
    assert torch.equal(found.tokens, expected.indices)


def test_masked_tokens_never_lead() -> None:
    """Tokens at -inf are not drawn; missing leaders have the score -inf."""
    logits = torch.full((2, 500), -torch.inf)
    logits[:, [3, 400]] = 0.0
    found = leaders(logits, torch.ones(2, dtype=torch.float64), row_keys([1, 2], [0, 0]), 4)
    assert set(found.tokens[0, :2].tolist()) == {3, 400}
    assert found.scores[:, 2:].isneginf().all()


@pytest.mark.parametrize("rows", [1, 7])
def test_leaders_among_a_list_equal_leaders_of_the_vocabulary(rows: int) -> None:
    """A list that holds every token is the same search."""
    logits = torch.randn(rows, 100, generator=torch.Generator().manual_seed(0))
    scale = torch.full((rows,), 1.3, dtype=torch.float64)
    keys = row_keys(range(rows), range(rows))
    listed = torch.arange(100).flip(0).expand(rows, -1)
    found = leaders_among(listed, logits.gather(1, listed), scale, keys, 3)
    expected = leaders(logits, scale, keys, 3)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.noise, expected.noise)
