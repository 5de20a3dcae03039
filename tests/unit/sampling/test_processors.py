"""Penalties, biases and masks, against transformers where it has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from outrider.protocol.constraint import Constraint, ConstraintKind
from outrider.protocol.messages import SamplingParams
from outrider.sampling.chooser import choose, rank
from outrider.sampling.history import History
from outrider.sampling.processors import SamplingRow, processed


def random_logits(rows: int, vocabulary: int = 100, seed: int = 0) -> torch.Tensor:
    """Logits [N, V] around zero."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def row(
    params: SamplingParams, prompt: list[int], output: list[int], path: tuple[int, ...] = ()
) -> SamplingRow:
    """A row behind prompt, output and a node's path."""
    history = History(prompt, output)
    generated = len(output) + len(path)
    return SamplingRow(
        params, len(prompt) + generated, generated, history.extended(path) if path else history
    )


def test_default_rows_cost_nothing() -> None:
    """Without penalties, biases or masks the logits come back untouched and uncopied."""
    logits = random_logits(2)
    assert processed(logits, [row(SamplingParams(temperature=1.0), [1], [2])] * 2, [0]) is logits


def test_repetition_penalty_is_that_of_transformers() -> None:
    """The same over prompt, output and path, each row with its own penalty and tokens."""
    logits = random_logits(3)
    kinds = [(1.3, [1, 2, 3], [4], (5, 5)), (0.7, [9], [], ()), (2.0, [7, 7], [8, 8], (7,))]
    rows = [
        row(SamplingParams(repetition_penalty=penalty), prompt, output, path)
        for penalty, prompt, output, path in kinds
    ]
    found = processed(logits, rows, [])
    for index, (penalty, prompt, output, path) in enumerate(kinds):
        ids = torch.tensor([[*prompt, *output, *path]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[index : index + 1].clone())[0]
        assert torch.equal(found[index], expected)


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    """OpenAI's definition: minus frequency x count, minus presence when there; the prompt is free."""
    logits = random_logits(1)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = processed(logits, [row(params, [1, 2], [2, 3], (3, 4))], [])
    change = (logits - found)[0]
    expected = torch.zeros(100)
    expected[2], expected[3], expected[4] = 0.75, 1.0, 0.75
    torch.testing.assert_close(change, expected, atol=1e-6, rtol=0)


def test_each_node_is_penalised_by_its_own_path() -> None:
    """A tree's rows, taken together, equal the same texts taken one by one as committed output."""
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1)
    base, paths = History([1, 2, 3], [4, 1]), [(), (5,), (5, 4), (5, 5, 6), (1,)]
    logits = random_logits(len(paths))
    rows = [SamplingRow(params, 5 + len(path), 2 + len(path), base.extended(path)) for path in paths]
    found = processed(logits, rows, [])
    for index, path in enumerate(paths):
        alone = processed(logits[index : index + 1], [row(params, [1, 2, 3], [4, 1, *path])], [])
        assert torch.equal(found[index], alone[0])


def test_bias_is_added_after_penalties() -> None:
    """A bias is not scaled by the repetition penalty."""
    logits = torch.tensor([[2.0, -2.0, 0.0]])
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 10.0, 2: -1.5})
    assert processed(logits, [row(params, [0, 1], [])], []).tolist() == [[11.0, -4.0, -1.5]]


def test_end_tokens_wait_for_min_tokens() -> None:
    """End and stop tokens are masked while fewer than min_tokens are generated, and not after."""
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,))
    logits = random_logits(3)
    rows = [row(params, [1], []), row(params, [1], [3], (4,)), row(params, [1], [3])]
    found = processed(logits, rows, [2])
    assert found.isneginf().nonzero().tolist() == [[0, 2], [0, 7], [2, 2], [2, 7]]


def test_ignore_eos_masks_nothing() -> None:
    """The end token may still be chosen; it only does not stop there."""
    logits = random_logits(1)
    assert processed(logits, [row(SamplingParams(ignore_eos=True), [1], [])], [2]) is logits


def test_tokens_beyond_the_vocabulary_are_skipped() -> None:
    """A draft with fewer padded outputs takes the same history and biases."""
    params = SamplingParams(
        repetition_penalty=1.5, logit_bias={100: 5.0}, min_tokens=5, stop_token_ids=(300,)
    )
    logits = random_logits(1)
    found = processed(logits, [row(params, [3, 200], [], (150,))], [101])
    assert (found != logits).nonzero().tolist() == [[0, 3]]


def test_the_logits_given_are_left_alone() -> None:
    """Log probabilities are reported of the unmodified distribution."""
    logits = random_logits(1)
    before = logits.clone()
    processed(logits, [row(SamplingParams(repetition_penalty=1.5, logit_bias={1: 1.0}), [3], [])], [])
    assert torch.equal(logits, before)


def mask_of(*tokens: int, size: int = 100) -> bytes:
    """A grammar's mask with these tokens."""
    bits = bytearray(-(-size // 8))
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def constrained(mask: bytes, generated: int = 5, **params: Any) -> SamplingRow:
    """A row with a mask."""
    constraint = Constraint(ConstraintKind.REGEX, ("x",))
    return SamplingRow(SamplingParams(constraint=constraint, **params), 9, generated, History([1], []), mask)


def left(logits: torch.Tensor) -> list[int]:
    """Tokens of a row that can be chosen."""
    return (logits > -torch.inf).nonzero()[:, 0].tolist()


def test_a_mask_leaves_its_tokens_as_they_are() -> None:
    """Each row by its own; rows without one are not touched."""
    logits = random_logits(3)
    rows = [constrained(mask_of(3, 64, 99)), row(SamplingParams(), [1], []), constrained(mask_of(7))]
    found = processed(logits, rows, [0])
    assert [left(found[0]), left(found[2])] == [[3, 64, 99], [7]]
    assert torch.equal(found[0, [3, 64, 99]], logits[0, [3, 64, 99]])
    assert torch.equal(found[1], logits[1])


@pytest.mark.parametrize(("size", "expected"), [(100, [3, 90]), (50, [3])])
def test_a_mask_may_be_longer_or_shorter_than_the_output_layer(size: int, expected: list[int]) -> None:
    """What it does not have is not allowed, what the layer does not have is not chosen."""
    assert left(processed(random_logits(1, 200), [constrained(mask_of(3, 90))], [])[0]) == [3, 90]
    assert left(processed(random_logits(1, size), [constrained(mask_of(3, 90))], [])[0]) == expected


@pytest.mark.parametrize(
    ("allowed", "params", "expected"),
    [
        ((0, 4), {"min_tokens": 9}, [4]),
        ((0,), {"min_tokens": 9}, [0]),
        ((0, 4), {"ignore_eos": True}, [4]),
        ((0,), {"ignore_eos": True}, [0]),
        ((0, 4, 6), {"min_tokens": 9, "stop_token_ids": (6,)}, [4]),
        ((0, 6), {"min_tokens": 9, "stop_token_ids": (6,)}, [0, 6]),
        ((0, 4, 6), {"min_tokens": 2, "stop_token_ids": (6,)}, [0, 4, 6]),
    ],
)
def test_a_text_that_must_end_ends(allowed: tuple[int, ...], params: Any, expected: list[int]) -> None:
    """min_tokens and ignore_eos keep ends away only while the grammar allows something else."""
    assert left(processed(random_logits(1), [constrained(mask_of(*allowed), **params)], [0])[0]) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen_and_ranked(temperature: float) -> None:
    """By the target's choice and by the draft's ranking, compiled or not, and with truncation."""
    logits, mask = random_logits(6, 4096), mask_of(5, 700, 3000, size=4096)
    for params in ({}, {"top_p": 0.5}, {"top_k": 2}, {"repetition_penalty": 1.5}):
        rows = [constrained(mask, temperature=temperature, seed=seed, **params) for seed in range(6)]
        assert set(choose(logits, rows, [0])) <= {5, 700, 3000}
        for ranking in rank(logits, rows, 8, 1.0, [0]):
            assert set(ranking.tokens[: len(ranking.buckets)]) <= {5, 700, 3000}
