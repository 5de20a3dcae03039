"""Penalties, biases and masks, against transformers where it has them."""

from __future__ import annotations

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from outrider.protocol.messages import SamplingParams
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
