"""Sampling kernels against the CPU's chooser, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser, on_device
from outrider.sampling.chooser import NO_TOKEN, SamplingRow, choose, rank
from outrider.sampling.history import History
from outrider.sampling.noise import gumbel_rows, row_keys
from outrider.sampling.replays import Replays
from outrider.sampling.truncation import weights
from tests.unit.engine.gpu.fakes import FakeGraphs

VOCABULARY = 1000
NOTHING = History([])


def rows_of(*params: SamplingParams) -> list[SamplingRow]:
    """A row at each of some positions."""
    return [SamplingRow(each, 100 + 7 * index, index, NOTHING) for index, each in enumerate(params)]


def logits_of(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Random logits; every seventh token is ruled out."""
    drawn = torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * spread
    drawn[:, ::7] = -torch.inf
    return drawn


def test_weights_have_the_bits_of_the_cpu():
    """Of all tokens together, at every temperature, also where they are next to nothing."""
    temperatures = [0.01, 0.3, 0.7, 1.0, 1.3, 2.0, 30.0]
    rows = rows_of(*(SamplingParams(temperature=each, top_p=0.9) for each in temperatures))
    logits = logits_of(len(rows), spread=8.0)
    found = on_device._whole(logits, on_device.upload(rows, [1.0] * len(rows), logits))
    heat = (logits - logits.amax(-1, keepdim=True)) / torch.tensor(temperatures)[:, None]
    assert torch.equal(found, weights(heat.double()).sum(-1, keepdim=True))


def test_noise_has_the_bits_of_the_cpu():
    """Every token's noise is equal, not close, for seeds at the ends of the range too."""
    keys = row_keys([0, 1, 2**63, 2**64 - 1], [0, 1, 1000, 2**31], "cpu")
    tokens = torch.cat([torch.arange(300), torch.tensor([128255, 2**18 + 5])]).repeat(4, 1)
    zeros = torch.zeros(tokens.shape)
    scores, noise = on_device.score(tokens, zeros, torch.ones(4, dtype=torch.float64), keys)
    expected = gumbel_rows(keys, tokens)
    assert torch.equal(noise, expected)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("seed", range(3))
def test_untruncated_rows_choose_the_tokens_of_the_cpu(seed):
    """Different temperatures and seeds in one batch."""
    heats = (0.3, 0.7, 1.0, 1.5)
    rows = rows_of(*(SamplingParams(temperature=heat, seed=seed * 10**9 + i) for i, heat in enumerate(heats)))
    logits = logits_of(4, seed)
    assert on_device.choose(logits, logits, rows) == choose(logits, rows, ())


def test_every_kind_of_row_in_one_batch():
    """Greedy, plain, top-k, top-p, min-p and all of them together."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, seed=2, top_k=5),
        SamplingParams(temperature=1.0, seed=3, top_p=0.8),
        SamplingParams(temperature=1.0, seed=4, min_p=0.1),
        SamplingParams(temperature=1.3, seed=5, top_k=40, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.0, seed=6, top_k=VOCABULARY + 5, top_p=0.5),
    ]
    for seed in range(3):
        logits, rows = logits_of(len(params), seed), rows_of(*params)
        assert on_device.choose(logits, logits, rows) == choose(logits, rows, ())


def test_a_row_that_the_list_cannot_decide_comes_back_unknown(monkeypatch):
    """A flat row whose nucleus is longer than the list; the others of the batch are chosen."""
    monkeypatch.setattr(on_device, "LISTED", 16)
    rows = rows_of(
        SamplingParams(temperature=1.0, seed=1, top_p=0.9), SamplingParams(temperature=0.2, seed=2, top_p=0.5)
    )
    logits = torch.stack([logits_of(1, spread=0.01)[0], logits_of(1, spread=5.0)[0]])
    assert on_device.choose(logits, logits, rows) == [on_device.UNKNOWN, choose(logits, rows, ())[1]]


def test_leaders_are_the_best_of_all_scores():
    """Tokens, scores and noise, against the CPU's noise of the whole vocabulary."""
    rows = rows_of(*(SamplingParams(temperature=0.8, seed=seed) for seed in range(3)))
    logits = logits_of(3)
    draws = on_device.upload(rows, [1.0, 1.2, 0.9], logits)
    found = on_device.leaders(logits, draws, 8)
    everything = torch.arange(VOCABULARY).repeat(3, 1)
    keys = row_keys([row.params.seed for row in rows], [row.position for row in rows])
    noise = gumbel_rows(keys, everything)
    scale = torch.tensor([1.0 / 0.8, 1.2 / 0.8, 0.9 / 0.8], dtype=torch.float64)
    best = (logits.double() * scale[:, None] + noise).topk(8)
    assert torch.equal(found.tokens, best.indices)
    assert torch.equal(found.scores, best.values)
    assert torch.equal(found.noise, noise.gather(1, best.indices))


def test_few_tokens_of_a_row_are_each_ranked_once(monkeypatch):
    """As a grammar leaves them, in fewer groups than there are ranks: tokens and confidences of the CPU."""
    rows = rows_of(*(SamplingParams(temperature=0.8, seed=seed) for seed in range(2)))
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[0, 19] = logits[1, 3] = logits[1, 700] = 1.0
    expected = rank(logits, rows, RANKS, 1.0, ())
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    assert rank(logits, rows, RANKS, 1.0, ()) == expected
    assert [len(each.tokens) for each in expected] == [1, 2]


def test_rows_without_a_number_have_no_token(monkeypatch):
    """NaN and -inf are found on the device; the other rows of the batch have their tokens."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9),
    ]
    rows = [SamplingRow(each, 10, 0, History([])) for each in params]
    logits = logits_of(2 * len(rows), seed=6)
    logits[: len(rows)] = torch.nan
    expected = choose(logits, rows * 2, ())
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    assert choose(logits, rows * 2, ()) == expected
    assert [token == NO_TOKEN for token in expected] == [True] * len(rows) + [False] * len(rows)


@pytest.mark.parametrize("size", [40, VOCABULARY])
@pytest.mark.parametrize("broken", [[torch.nan], [torch.inf], [torch.inf, torch.nan]])
def test_broken_logits_leave_the_tokens_of_the_cpu(monkeypatch, broken, size):
    """NaN counts as -inf and infinity beats every number, also in a vocabulary of less than one group."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, seed=2, top_k=5),
        SamplingParams(temperature=1.0, seed=3, top_p=0.8),
        SamplingParams(temperature=1.0, seed=4, min_p=0.1),
    ]
    rows, logits = rows_of(*params), logits_of(len(params), seed=8)[:, :size].contiguous()
    logits[:, 11 : 11 + len(broken)] = torch.tensor(broken)
    expected, ranked = choose(logits, rows, ()), rank(logits, rows, 1, 1.0, ())
    assert NO_TOKEN not in expected
    for kernels in (True, False):
        monkeypatch.setattr(chooser, "has_kernels", lambda device, kernels=kernels: kernels)
        monkeypatch.setattr(chooser, "available", lambda: False)
        assert choose(logits, rows, ()) == expected
        assert [each.tokens for each in rank(logits, rows, 1, 1.0, ())] == [each.tokens for each in ranked]


@pytest.mark.parametrize("size", [40, VOCABULARY])
def test_tokens_of_rows_without_numbers_exist(monkeypatch, size):
    """Whatever is ranked for them is in the vocabulary: draft models look tokens up."""
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_p=0.8)]
    logits = torch.full((len(params), size), torch.nan)
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    for ranking in rank(logits, rows_of(*params), RANKS, 1.0, ()):
        assert ranking.tokens == []
        assert all(0 <= token < size for token in ranking.winners)


def test_rows_with_penalties_share_the_batch(monkeypatch):
    """Penalties, biases and forced lengths change their own rows; all are chosen on the device, to the same
    tokens.
    """
    history = History([3, 4, 4, 5])
    params = [
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, seed=2, repetition_penalty=1.4),
        SamplingParams(temperature=1.0, seed=3, top_p=0.8, frequency_penalty=0.7, presence_penalty=0.3),
        SamplingParams(temperature=0.0, logit_bias={3: 30.0}),
        SamplingParams(temperature=1.3, seed=5, min_tokens=8),
    ]
    rows = [SamplingRow(each, 100 + index, index, history) for index, each in enumerate(params)]
    logits = logits_of(len(params), seed=4)
    logits[4, 2] = 40.0  # the end, were it allowed
    expected, ranked = choose(logits, rows, (2,)), rank(logits, rows, 8, 1.0, (2,))
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    monkeypatch.setattr(chooser, "_choose_in_torch", None)
    monkeypatch.setattr(chooser, "_rank_in_torch", None)
    assert choose(logits, rows, (2,)) == expected
    assert expected[3] == 3
    assert expected[4] != 2
    assert [each.tokens[0] for each in rank(logits, rows, 8, 1.0, (2,))] == [
        each.tokens[0] for each in ranked
    ]


def test_rankings_are_those_of_the_cpu(monkeypatch):
    """Greedy, sampled and truncated rows of one batch: tokens and winners; confidences as far as rounding."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.4, seed=2, top_k=3),
        SamplingParams(temperature=1.0, seed=3, top_p=0.8),
    ]
    rows, logits = rows_of(*params), logits_of(4, seed=9)
    expected = rank(logits, rows, 8, [1.0, 0.8, 1.2, 1.0], ())
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    found = rank(logits, rows, 8, [1.0, 0.8, 1.2, 1.0], ())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens[: len(theirs.tokens)] == theirs.tokens or ours.tokens[0] == theirs.tokens[0]
        assert ours.winners == theirs.winners
        assert all(abs(a - b) <= 1 for a, b in zip(ours.buckets, theirs.buckets, strict=False))


def test_unknown_rows_are_chosen_the_long_way(monkeypatch):
    """The caller never sees an undecided row."""
    rows = rows_of(
        SamplingParams(temperature=1.0, seed=1, top_p=0.9), SamplingParams(temperature=0.2, seed=2, top_p=0.5)
    )
    logits = torch.stack([logits_of(1, spread=0.01)[0], logits_of(1, spread=5.0)[0]])
    expected = choose(logits, rows, ())
    monkeypatch.setattr(on_device, "LISTED", 16)
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    assert choose(logits, rows, ()) == expected


RANKS = 8
KINDS = {
    "greedy": [SamplingParams(temperature=0.0)],
    "sampled": [SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=1.4, seed=2)],
    "truncated": [
        SamplingParams(temperature=0.9, seed=3, top_p=0.8),
        SamplingParams(temperature=1.0, seed=4, top_k=5),
    ],
}
KINDS["all"] = [*KINDS["greedy"], *KINDS["truncated"][:1], *KINDS["sampled"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_ranking_is_the_one_without_graphs(monkeypatch, kind):
    """Batches of several sizes, each a second time with other logits, positions and slopes, many equal."""
    graphs = FakeGraphs()
    replays = Replays(graphs, 320, torch.device("cpu"))
    for seed, count in enumerate((3, 5, 4, 6)):  # two of 4 rows, two of 8
        params = [KINDS[kind][index % len(KINDS[kind])] for index in range(count)]
        rows = [SamplingRow(each, 10 * seed + index, index, NOTHING) for index, each in enumerate(params)]
        logits, slopes = logits_of(count, seed)[:, :320], [0.8 + 0.1 * index for index in range(count)]
        if seed > 1:
            logits = logits.round()
        with monkeypatch.context() as patch:
            expected = on_device.rank(logits, rows, slopes, RANKS)
            patch.setattr(on_device, "_replays", lambda device, size: replays)
            assert on_device.rank(logits, rows, slopes, RANKS) == expected
    assert (graphs.captured, graphs.replayed) == (2, 4)


def test_greedy_leaders_come_with_their_probabilities():
    """Against plain torch, for ranks that the caller sees."""
    logits = logits_of(3)
    found = on_device.rank(logits, rows_of(*[SamplingParams()] * 3), [1.0] * 3, RANKS)
    expected = logits.softmax(-1).topk(8)
    assert found.tokens == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor(found.shares), expected.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("top_k", "tries"), [(3, 1), (16, 0)])
def test_batches_without_a_graph_are_ranked_all_the_same(monkeypatch, top_k, tries):
    """Too many rows, lists of a length of their own, and a capture that fails, which is tried once."""
    tried = []

    class Refusing:
        def capture(self, run):
            tried.append(1)
            raise RuntimeError("operation not permitted when stream is capturing")

    replays = Replays(Refusing(), 100, torch.device("cpu"))
    monkeypatch.setattr(on_device, "LISTED", 16)
    for count in (1, 2, 33):
        rows = rows_of(*[SamplingParams(temperature=0.7, seed=1, top_k=top_k)] * count)
        logits = logits_of(count, count)[:, :100]
        with monkeypatch.context() as patch:
            expected = on_device.rank(logits, rows, [1.0] * count, RANKS)
            patch.setattr(on_device, "_replays", lambda device, size: replays)
            assert on_device.rank(logits, rows, [1.0] * count, RANKS) == expected
    assert len(tried) == tries
