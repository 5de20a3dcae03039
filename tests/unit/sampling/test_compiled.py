"""The compiled kernels give the tokens, scores and rankings of the operations that define it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.cpu.kernels.compiling import available
from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser
from outrider.sampling.chooser import NO_TOKEN, Ranking, SamplingRow, choose, rank
from outrider.sampling.history import History

pytestmark = pytest.mark.skipif(not available(), reason="the kernels need the package numba")
NOTHING = History([])
VOCABULARIES = [1, 7, 8, 63, 64, 65, 500, 513, 2048, 4099, 33000]


def rows_of(params: list[SamplingParams], position: int = 10) -> list[SamplingRow]:
    """A row at each of some positions."""
    return [SamplingRow(each, position + index, index, NOTHING) for index, each in enumerate(params)]


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
    chosen = choose(logits, rows, ())
    assert chosen == chooser._choose_in_torch(logits, rows)
    for index, row in enumerate(rows):
        assert choose(logits[index : index + 1], [row], ()) == chosen[index : index + 1]


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
    rivals = min(max(count, chooser._RIVALS), vocabulary)
    expected = chooser._rank_in_torch(logits, rows, slopes, rivals, count)
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


def test_without_the_compiler_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, more slowly."""
    params = [SamplingParams(temperature=1.0, top_p=0.8, seed=seed) for seed in range(20)]
    logits, rows = logits_of(20, 1000, 3.0, 1), rows_of(params)
    chosen, ranked = choose(logits, rows, ()), rank(logits, rows, 4, 1.0, ())
    monkeypatch.setattr(chooser, "available", lambda: False)
    assert choose(logits, rows, ()) == chosen
    for ranking, other in zip(rank(logits, rows, 4, 1.0, ()), ranked, strict=True):
        assert_alike(ranking, other)


def test_rows_may_lie_anywhere() -> None:
    """One row for all, every second row, columns of a larger table, transposed."""
    logits = logits_of(6, 300, 3.0, 2)
    rows = rows_of([SamplingParams(temperature=1.0, top_k=50, seed=4)] * 6)
    table = torch.cat([logits, logits], 1)
    for view in (logits[:1].expand(6, -1), table[:, 300:], logits.T.contiguous().T, logits.flip(0)):
        assert choose(view, rows, ()) == chooser._choose_in_torch(view.contiguous(), rows)
    assert choose(logits[::2], rows[:3], ()) == chooser._choose_in_torch(logits[::2], rows[:3])


def test_no_rows_have_no_tokens() -> None:
    """A step in the middle of all prompts chooses nothing."""
    assert choose(torch.empty(0, 50), [], ()) == []
    assert rank(torch.empty(0, 50), [], 4, 1.0, ()) == []


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_hopeless_logits_do_no_harm(value: float) -> None:
    """They give some token, or none; one broken logit does not hide the others."""
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=0.5, top_p=0.5),
        SamplingParams(temperature=0.5, top_k=9, top_p=0.5, min_p=0.1),
        SamplingParams(),
    ]
    rows = rows_of(params)
    logits = torch.full((len(rows), 1000), value)
    assert all(0 <= token < 1000 or token == NO_TOKEN for token in choose(logits, rows, ()))
    rank(logits, rows, 4, 1.0, ())
    if value < 0 or value != value:
        logits[:, [7, 900]] = torch.tensor([3.0, 2.0])
        assert set(choose(logits, rows, ())) <= {7, 900}
