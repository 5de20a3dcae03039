"""Texts of a target, and what a draft makes of them."""

from __future__ import annotations

import pytest

from outrider.engine.kv.pages import SequenceKv
from outrider.engine.runner import ModelRunner, Segment
from simulator.pair.models import ModelChoice, read, weight_bytes
from simulator.pair.ranks import rank_texts, without_guesses
from simulator.pair.texts import write_texts
from simulator.traces import NO_RANK
from tests.models import build_model

PROMPTS = [[5, 6, 7, 8], [9, 10], *([number] for number in range(11, 19))]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A tiny random model in float32."""
    folder = build_model("llama", tmp_path_factory.mktemp("model"))
    return ModelChoice(str(folder), "float32").load(4096)


def next_token(runner: ModelRunner, tokens: list[int]) -> int:
    """What the model says greedily, computed from the beginning."""
    kv = SequenceKv.open(runner.pool, [])
    logits = runner.forward([Segment(kv, tokens, None, [len(tokens) - 1])])
    kv.release()
    return int(logits.argmax(-1)[0])


def test_texts_are_what_the_model_says_one_by_one(runner: ModelRunner) -> None:
    """Though they are written many at a time; the memory is free again."""
    texts = write_texts(runner, PROMPTS, 0.0, 5)
    assert [len(text.tokens) for text in texts] == [5] * len(PROMPTS)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = list(prompt)
        for token in text.tokens:
            assert token == next_token(runner, tokens)
            tokens.append(token)
    assert runner.pool.statistics().used == 0


def test_a_text_ends_where_the_model_ends_it(runner: ModelRunner) -> None:
    """Its last token is the one that ended it."""
    whole = write_texts(runner, PROMPTS[:2], 0.0, 6)
    end = whole[0].tokens[2]
    first = whole[0].tokens.index(end)
    counts: list[int] = []
    cut = write_texts(runner, PROMPTS[:2], 0.0, 6, [end], counts.append)
    assert cut[0].tokens == whole[0].tokens[: first + 1]
    assert counts == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_model_is_the_best_draft_of_itself(runner: ModelRunner, temperature: float) -> None:
    """It ranks every token first, sampled ones too: it knows the noise."""
    texts = write_texts(runner, PROMPTS, temperature, 6)
    for trace, text in zip(rank_texts(runner, texts), texts, strict=True):
        assert trace.tokens == text.tokens
        assert [guess.rank for guess in trace.guesses] == [0] * 6


def test_another_model_is_no_good_draft(runner: ModelRunner, tmp_path) -> None:
    """Its ranks say so."""
    other = ModelChoice(str(build_model("llama", tmp_path, seed=3)), "float32").load(1024)
    ranks = [
        g.rank for trace in rank_texts(other, write_texts(runner, PROMPTS, 0.0, 6)) for g in trace.guesses
    ]
    assert ranks.count(NO_RANK) > len(ranks) / 2


def test_without_a_model_there_are_no_guesses(runner: ModelRunner) -> None:
    """The texts are there all the same."""
    texts = write_texts(runner, PROMPTS[:1], 0.0, 3)
    assert [(trace.tokens, trace.guesses) for trace in without_guesses(texts)] == [(texts[0].tokens, ())]


def test_reading_in_pieces_is_reading(runner: ModelRunner) -> None:
    """What follows a long prompt does not depend on the pieces."""
    tokens = [5 + number % 200 for number in range(300)]
    kv = SequenceKv.open(runner.pool, [])
    read(runner, kv, tokens[:-1])
    logits = runner.forward([Segment(kv, tokens[-1:], None, [0])])
    kv.release()
    assert int(logits.argmax(-1)[0]) == next_token(runner, tokens)


def test_skipped_layers_and_8_bits_take_less_memory(runner: ModelRunner, tmp_path) -> None:
    """Measured as it is in memory."""
    folder = str(build_model("llama", tmp_path))
    part = ModelChoice(folder, "float32", skipped_layers=frozenset({0, 1})).load(64)
    rounded = ModelChoice(folder, "float32", weights="int8").load(64)
    assert weight_bytes(part) < weight_bytes(runner)
    assert weight_bytes(rounded) < weight_bytes(runner)
