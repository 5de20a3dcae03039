"""The noise is standard Gumbel, independent over seeds, positions and tokens, tails included."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2_contingency, gumbel_r, kstest, poisson

from outrider.sampling.noise import GROUP, gumbel, gumbel_rows, peaks, row_keys

SMALLEST_P = 1e-4
SIZE = 200_000


def noise_over(axis: str) -> torch.Tensor:
    """Noise [SIZE] along one axis, the other two fixed."""
    if axis == "token":
        return gumbel(5, 9, torch.arange(SIZE))
    fixed = torch.full((SIZE, 1), 77)
    if axis == "position":
        return gumbel_rows(row_keys([5] * SIZE, range(SIZE)), fixed)[:, 0]
    return gumbel_rows(row_keys(range(SIZE), [9] * SIZE), fixed)[:, 0]


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_standard_gumbel(axis: str) -> None:
    """Kolmogorov-Smirnov test and the first two moments, along each axis."""
    noise = noise_over(axis)
    assert kstest(noise.numpy(), gumbel_r.cdf).pvalue > SMALLEST_P
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=4.5 * math.pi / math.sqrt(6 * SIZE))
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 63, 64, 4096])
def test_neighbours_are_uncorrelated(axis: str, lag: int) -> None:
    """No correlation at any lag, of the noise and of its size."""
    noise = noise_over(axis)
    for series in (noise, (noise - noise.mean()).abs()):
        pair = torch.stack([series[:-lag], series[lag:]])
        assert abs(float(pair.corrcoef()[0, 1])) < 4.5 / math.sqrt(SIZE)


@pytest.mark.parametrize("other", [1, 40, 64, 1000])
def test_two_tokens_are_independent(other: int) -> None:
    """Tokens of one group and of two: a contingency test over octiles of both."""
    keys = row_keys([8] * SIZE, range(SIZE))
    noise = gumbel_rows(keys, torch.tensor([0, other]).expand(SIZE, -1))
    edges = torch.tensor([-math.log(-math.log(step / 8)) for step in range(1, 8)], dtype=torch.float64)
    cells = torch.bucketize(noise.contiguous(), edges)
    table = (cells[:, 0] * 8 + cells[:, 1]).bincount(minlength=64).view(8, 8)
    assert chi2_contingency(table.numpy(), lambda_="log-likelihood").pvalue > SMALLEST_P


def test_the_top_tail_is_right_and_without_gaps() -> None:
    """Of 2^26 tokens' noise, as many exceed each height as should, and no two of the largest are equal."""
    groups = 2**17
    largest = torch.cat([peaks(row_keys([seed], [0]), groups)[0][0] for seed in range(8)])
    for height in (8.0, 10.0, 12.0, 14.0, 16.0):
        expected = 8 * groups * -math.expm1(-GROUP * math.exp(-height))
        seen = int((largest > height).sum())
        assert min(poisson.cdf(seen, expected), poisson.sf(seen - 1, expected)) > SMALLEST_P
    top = largest.topk(10_000).values
    assert top.unique().numel() == 10_000
    assert float(top[0]) > 15.0


def test_peaks_are_the_maximum_of_their_group_in_law() -> None:
    """The largest of 64 Gumbel variables is Gumbel plus ln 64, its place uniform and independent of it."""
    noise, tokens = (found[0] for found in peaks(row_keys([3], [3]), SIZE))
    assert kstest(noise.numpy() - math.log(GROUP), gumbel_r.cdf).pvalue > SMALLEST_P
    high = noise > noise.median()
    places = [(tokens % GROUP)[half].bincount(minlength=GROUP).tolist() for half in (high, ~high)]
    assert chi2_contingency(places, lambda_="log-likelihood").pvalue > SMALLEST_P
