"""The choice is exact, and depends on its row alone."""

from __future__ import annotations

import pytest
import torch

from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser
from outrider.sampling.chooser import NO_TOKEN, SamplingRow, choose, logprobs, rank
from outrider.sampling.history import History
from outrider.sampling.noise import gumbel
from outrider.speculation.acceptance import BUCKETS, SHARPNESS_GRID

VARIED = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=1.0, top_k=40, repetition_penalty=1.2, presence_penalty=0.5, seed=3),
    SamplingParams(temperature=1.3, min_p=0.05, logit_bias={5: 3.0, 9: -100.0}, seed=4),
    SamplingParams(repetition_penalty=1.3, min_tokens=5),
    SamplingParams(temperature=1.7, top_p=0.99, seed=5),
    SamplingParams(temperature=0.9, frequency_penalty=0.7, seed=2**64 - 1),
]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Logits [N, V]."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(params: list[SamplingParams]) -> list[SamplingRow]:
    """Rows at various positions with histories of their own."""
    return [
        SamplingRow(each, 10 + index, 2, History([index, 3, 4], [5]).extended([6]))
        for index, each in enumerate(params)
    ]


def test_a_sampled_choice_is_the_argmax_of_logit_and_noise() -> None:
    """The definition, spelled out."""
    logits = random_logits(1, 4096)
    row = SamplingRow(SamplingParams(temperature=0.8, seed=77), 12, 0, History([1]))
    expected = (logits[0].double() / 0.8 + gumbel(77, 12, torch.arange(4096))).argmax()
    assert choose(logits, [row], []) == [expected.item()]


def test_a_greedy_choice_is_the_argmax() -> None:
    """No noise is drawn at temperature 0, also between sampled rows; the first of equals wins."""
    logits = random_logits(3, 300)
    logits[1, [40, 50]] = 100.0
    rows = [
        SamplingRow(SamplingParams(temperature=1.0), 1, 0, History([])),
        SamplingRow(SamplingParams(), 1, 0, History([])),
        SamplingRow(SamplingParams(temperature=1.0, top_k=1), 1, 0, History([])),
    ]
    assert choose(logits, rows, [])[1:] == [40, logits[2].argmax().item()]
    assert choose(logits[1:2], rows[1:2], []) == [40]


@pytest.mark.parametrize("vocabulary", [50, 1000, 4099])
def test_a_row_does_not_depend_on_its_batch(vocabulary: int) -> None:
    """Alone, in any company and in any order, a row gives the same token."""
    logits = random_logits(len(VARIED), vocabulary)
    rows = rows_of(VARIED)
    together = choose(logits, rows, [2])
    for index, row in enumerate(rows):
        assert choose(logits[index : index + 1], [row], [2]) == together[index : index + 1]
    backwards = choose(logits.flip(0), rows[::-1], [2])
    assert backwards[::-1] == together
    assert choose(logits[::2], rows[::2], [2]) == together[::2]


def test_probabilities_are_the_same_bits_in_every_batch() -> None:
    """Rounded logits tie at the nucleus' edge; still the same tokens whatever the batch."""
    logits = random_logits(64, 1003).round()
    rows = [
        SamplingRow(SamplingParams(temperature=1.0, top_p=0.7, seed=i), i, 0, History([])) for i in range(64)
    ]
    together = choose(logits, rows, [])
    for size in (1, 3, 32):
        parts = (choose(logits[i : i + size], rows[i : i + size], []) for i in range(0, 64, size))
        assert [token for part in parts for token in part] == together


def test_the_same_model_ranks_the_choice_first() -> None:
    """A draft with the target's own logits and sharpness 1 predicts every sample."""
    logits = random_logits(len(VARIED), 2000)
    rows = rows_of(VARIED)
    rankings = rank(logits, rows, 3, 1.0, [2])
    assert [ranking.tokens[0] for ranking in rankings] == choose(logits, rows, [2])
    for ranking, row in zip(rankings, rows, strict=True):
        assert len(ranking.tokens) == len(ranking.buckets) == 3
        assert all((bucket < BUCKETS // 2) == row.params.greedy for bucket in ranking.buckets)


def test_ranking_is_by_sharpened_score() -> None:
    """The order is that of sharpness x logit / temperature + noise, each row with its own sharpness."""
    logits = random_logits(2, 1000)
    rows = [SamplingRow(SamplingParams(temperature=0.5, seed=9), 4, 0, History([]))] * 2
    found = rank(logits, rows, 4, [0.5, 3.0], [])
    for ranking, line, sharpness in zip(found, logits, [0.5, 3.0], strict=True):
        scores = sharpness * line.double() / 0.5 + gumbel(9, 4, torch.arange(1000))
        assert ranking.tokens == scores.topk(4).indices.tolist()


def test_winners_are_what_other_sharpness_would_put_first() -> None:
    """One ranking tests the whole grid: exactly near its own sharpness, nearly so far from it."""
    logits = random_logits(20, 500)
    rows = [SamplingRow(SamplingParams(temperature=1.0, seed=3), i, 0, History([])) for i in range(20)]
    now = rank(logits, rows, 4, 1.2, [])
    for place, sharpness in enumerate(SHARPNESS_GRID):
        then = rank(logits, rows, 1, sharpness, [])
        same = [a.winners[place] == b.tokens[0] for a, b in zip(now, then, strict=True)]
        assert sum(same) >= (20 if 1.0 <= sharpness <= 1.5 else 15)


def test_low_temperatures_still_rank_and_tell_apart() -> None:
    """Scores far apart underflow nothing, and a close race is less certain than a clear one."""
    logits = torch.full((2, 100), -20.0)
    logits[:, :3] = torch.tensor([[1.0, 0.9, 0.8], [9.0, 0.9, 0.8]])
    rows = [SamplingRow(SamplingParams(temperature=0.01, seed=1), 0, 0, History([]))] * 2
    close, clear = rank(logits, rows, 4, 1.0, [])
    assert close.tokens[:3] == clear.tokens[:3] == [0, 1, 2]
    assert len(clear.tokens) == len(close.tokens) == 4
    assert close.buckets[0] < clear.buckets[0]


def test_truncation_can_leave_fewer_than_asked_for() -> None:
    """top-k 2 has two candidates."""
    row = SamplingRow(SamplingParams(temperature=1.0, top_k=2), 0, 0, History([]))
    (ranking,) = rank(random_logits(1, 100), [row], 5, 1.0, [])
    assert len(ranking.tokens) == len(ranking.buckets) == 2


def test_a_vocabulary_smaller_than_the_count_is_ranked_whole() -> None:
    """Tiny models work."""
    rows = [
        SamplingRow(SamplingParams(temperature=1.0), 0, 0, History([])),
        SamplingRow(SamplingParams(), 0, 0, History([])),
    ]
    assert [sorted(ranking.tokens) for ranking in rank(random_logits(2, 3), rows, 8, 1.0, [])] == [
        [0, 1, 2]
    ] * 2


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_logits_without_a_number_have_no_token(value: float) -> None:
    """A broken model must not stop the other rows of a batch."""
    rows = rows_of(VARIED)
    logits = torch.full((len(rows), 100), value)
    assert choose(logits, rows, []) == [NO_TOKEN] * len(rows)
    logits[0] = 0.0
    assert [token >= 0 for token in choose(logits, rows, [])] == [True] + [False] * (len(rows) - 1)
    for row in rows:
        rank(logits[:1], [row], 3, 1.0, [])


@pytest.mark.parametrize("first", ["choose", "rank"])
def test_a_kernel_that_does_not_compile_leaves_its_device_to_torch(first, monkeypatch, caplog) -> None:
    """Neither a choice nor a ranking fails; it is said once, and no kernel of the device is tried again."""
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is for Linux alone")
    rows, logits = rows_of(VARIED), random_logits(len(VARIED), 300)
    calls = [lambda: choose(logits, rows, [2]), lambda: rank(logits, rows, 4, 1.0, [2])]
    expected = [call() for call in calls]
    tried = []

    def refuse(*_: object) -> None:
        tried.append(1)
        raise errors.OutOfResources(140800, 101376, "shared memory")

    monkeypatch.setattr(chooser, "_WITHOUT", set())
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)
    monkeypatch.setattr(chooser, "_choose_on_device", refuse)
    monkeypatch.setattr(chooser, "_rank_on_device", refuse)
    order = (0, 1) if first == "choose" else (1, 0)
    assert [calls[place]() for place in order] == [expected[place] for place in order]
    assert len(tried) == 1
    assert caplog.text.count("choices and rankings run without kernels") == 1


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    """The chosen token's, and the best few in order."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    (found,) = logprobs(logits, [2], 2)
    assert found.token == 2
    assert found.logprob == pytest.approx(-2.0794415)
    assert [token for token, _ in found.top] == [0, 1]
    assert [value for _, value in found.top] == pytest.approx([-0.6931472, -1.3862944])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_chooses_the_same_tokens() -> None:
    """The same logits give the same choices and rankings on both devices."""
    logits = random_logits(len(VARIED), 5000)
    rows = rows_of(VARIED)
    assert choose(logits.cuda(), rows, [2]) == choose(logits, rows, [2])
    on_gpu, here = (rank(where, rows, 4, 1.2, [2]) for where in (logits.cuda(), logits))
    assert [ranking.tokens for ranking in on_gpu] == [ranking.tokens for ranking in here]
