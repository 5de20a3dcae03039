"""When requests are sent."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from outrider.cli.bench.arrivals import poisson


def test_arrivals_have_the_rate() -> None:
    """Over many requests, as many come in a second as were asked for."""
    offsets = poisson(20.0, 20_000, random.Random(1))
    assert offsets[0] == 0.0
    assert list(offsets) == sorted(offsets)
    assert 20_000 / offsets[-1] == pytest.approx(20.0, rel=0.03)


def test_pauses_are_exponential() -> None:
    """Their deviation is their mean, as where users know nothing of each other."""
    offsets = poisson(5.0, 20_000, random.Random(2))
    pauses = [later - earlier for earlier, later in pairwise(offsets)]
    mean = sum(pauses) / len(pauses)
    deviation = math.sqrt(sum((pause - mean) ** 2 for pause in pauses) / len(pauses))
    assert deviation == pytest.approx(mean, rel=0.05)


def test_a_seed_gives_the_same_arrivals() -> None:
    """Two runs are the same load."""
    assert poisson(3.0, 50, random.Random(7)) == poisson(3.0, 50, random.Random(7))
    assert poisson(3.0, 50, random.Random(7)) != poisson(3.0, 50, random.Random(8))


def test_an_infinite_rate_is_all_at_once() -> None:
    """No request waits."""
    assert poisson(math.inf, 4, random.Random(0)) == (0.0, 0.0, 0.0, 0.0)
