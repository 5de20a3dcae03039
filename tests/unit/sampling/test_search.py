"""The compiled pass gives the tokens, scores and rankings of the operations that define it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.messages import SamplingParams
from outrider.sampling import chooser
from outrider.sampling.chooser import Ranking, Row, choose, rank
from outrider.sampling.history import History
from outrider.sampling.kernels import search

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="the kernels need the package llvmlite"
)
NOTHING = History([])
VOCABULARIES = [1, 7, 8, 63, 64, 65, 500, 513, 2048, 4099, 33000]


def rows_of(params: list[SamplingParams], position: int = 10) -> list[Row]:
    """A row at each of some positions."""
    return [Row(each, position + index, index, NOTHING) for index, each in enumerate(params)]


def logits_of(rows: int, vocabulary: int, spread: float, seed: int, grain: float = 0.0) -> torch.Tensor:
    """Random logits, rounded to a grain so that many are equal; some rows have tokens that are ruled out."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    drawn = torch.randn(rows, vocabulary, generator=generator) * spread
    if grain:
        drawn = (drawn / grain).round() * grain  # with zeros of both signs
    drawn[::2, 1::3] = -torch.inf
    return drawn


def params_of(draw: st.DrawFn) -> SamplingParams:
    """Any temperature and truncation."""
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.7, 30.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 40, 700])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.9, 0.3, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1e-9, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


all_params = st.lists(st.composite(params_of)(), min_size=1, max_size=6)
"""Of the rows of one call."""


@settings(max_examples=150, deadline=None)
@given(
    params=all_params,
    vocabulary=st.sampled_from(VOCABULARIES),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    grain=st.sampled_from([0.0, 0.5]),
    position=st.integers(0, 2**31 - 1),
)
def test_choices_are_those_of_torch(
    params: list[SamplingParams], vocabulary: int, spread: float, grain: float, position: int
) -> None:
    """Whatever is equal, ruled out or cut off, alone and in company."""
    logits = logits_of(len(params), vocabulary, spread, params[0].seed, grain)
    rows = rows_of(params, position)
    chosen = search.choose(logits, rows)
    assert chosen == chooser._choose_in_torch(logits, rows)
    for index, row in enumerate(rows):
        assert search.choose(logits[index : index + 1], [row]) == chosen[index : index + 1]


@settings(max_examples=100, deadline=None)
@given(
    params=all_params,
    vocabulary=st.sampled_from(VOCABULARIES),
    spread=st.sampled_from([0.1, 3.0]),
    count=st.sampled_from([1, 4, 8, 13]),
)
def test_rankings_are_those_of_torch(
    params: list[SamplingParams], vocabulary: int, spread: float, count: int
) -> None:
    """Tokens, what is learned from them, and what other sharpness would put first."""
    logits = logits_of(len(params), vocabulary, spread, params[0].seed)
    rows, count = rows_of(params), min(count, vocabulary)
    slopes = [(0.5, 1.0, 2.2)[index % 3] for index in range(len(rows))]
    expected = chooser._rank_in_torch(logits, rows, count, slopes)
    for row, ranking, other in zip(rows, rank(logits, rows, count, slopes, ()), expected, strict=True):
        left = len(ranking.tokens)
        if row.params.greedy:  # torch goes on with tokens that are ruled out, in any order
            assert left == min(count, int((logits[rows.index(row)] > -torch.inf).sum()))
        assert_alike(ranking, Ranking(other.tokens[:left], other.buckets[:left], other.winners))


def assert_alike(one: Ranking, other: Ranking) -> None:
    """The same but for estimates on the very edge of a bucket."""
    assert (one.tokens, one.winners) == (other.tokens, other.winners)
    assert all(abs(a - b) <= 1 for a, b in zip(one.buckets, other.buckets, strict=True))
    assert sum(a != b for a, b in zip(one.buckets, other.buckets, strict=True)) <= 1


@pytest.fixture
def plain_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels compiled for any processor of this kind, without its vector extensions."""
    from llvmlite import binding

    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: binding.FeatureMap({}))
    search._code.cache_clear()
    yield
    search._code.cache_clear()


@pytest.mark.usefixtures("plain_processor")
def test_an_old_processor_chooses_the_same_tokens() -> None:
    """Vectors are cut into what there is."""
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2),
        SamplingParams(temperature=1.3, top_k=40, min_p=0.01, seed=3),
        SamplingParams(),
    ]
    logits = logits_of(len(params), 3001, 3.0, 5)
    for position in range(0, 200, 10):
        rows = rows_of(params, position)
        assert search.choose(logits, rows) == chooser._choose_in_torch(logits, rows)
        expected = chooser._rank_in_torch(logits, rows, 4, [1.2] * 4)
        for ranking, other in zip(rank(logits, rows, 4, 1.2, ()), expected, strict=True):
            assert_alike(ranking, other)


def test_without_the_compiler_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, more slowly."""
    params = [SamplingParams(temperature=1.0, top_p=0.8, seed=seed) for seed in range(20)]
    logits, rows = logits_of(20, 1000, 3.0, 1), rows_of(params)
    compiled = choose(logits, rows, ()), rank(logits, rows, 4, 1.0, ())
    monkeypatch.setattr(search, "available", lambda: False)
    assert choose(logits, rows, ()) == compiled[0]
    for ranking, other in zip(rank(logits, rows, 4, 1.0, ()), compiled[1], strict=True):
        assert_alike(ranking, other)


def test_rows_may_lie_anywhere() -> None:
    """One row for all, every second row, columns of a larger table, transposed."""
    logits = logits_of(6, 300, 3.0, 2)
    rows = rows_of([SamplingParams(temperature=1.0, top_k=50, seed=4)] * 6)
    table = torch.cat([logits, logits], 1)
    for view in (logits[:1].expand(6, -1), table[:, 300:], logits.T.contiguous().T, logits.flip(0)):
        assert search.choose(view, rows) == chooser._choose_in_torch(view.contiguous(), rows)
    assert search.choose(logits[::2], rows[:3]) == chooser._choose_in_torch(logits[::2], rows[:3])


def test_no_rows_have_no_tokens() -> None:
    """A step in the middle of all prompts chooses nothing."""
    assert search.choose(torch.empty(0, 50), []) == []
    assert rank(torch.empty(0, 50), [], 4, 1.0, ()) == []


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_hopeless_logits_do_no_harm(value: float) -> None:
    """They give some token; one broken logit does not hide the others."""
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=0.5, top_p=0.5),
        SamplingParams(temperature=0.5, top_k=9, top_p=0.5, min_p=0.1),
        SamplingParams(),
    ]
    rows = rows_of(params)
    logits = torch.full((len(rows), 1000), value)
    assert all(0 <= token < 1000 for token in search.choose(logits, rows))
    rank(logits, rows, 4, 1.0, ())
    if value < 0 or value != value:
        logits[:, [7, 900]] = torch.tensor([3.0, 2.0])
        assert set(search.choose(logits, rows)) <= {7, 900}
