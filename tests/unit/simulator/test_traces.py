"""Recorded texts."""

from __future__ import annotations

import json
from random import Random

import pytest

from outrider.protocol.errors import ConfigError
from simulator.profile import FOLDER
from simulator.traces import (
    MIN_VOCABULARY,
    NO_RANK,
    Corpus,
    Guess,
    Trace,
    compact,
    encode,
    load_corpus,
    replay,
    write_script,
)

TRACE = Trace((9, 8), (1, 2, 3, 4), 7, tuple(Guess(rank, (rank, 39)) for rank in (0, 1, NO_RANK, 2)))
CORPUS = Corpus(100, (TRACE,))


def test_a_trace_survives_its_file(tmp_path):
    """Ranks and buckets are letters there."""
    trace = Trace((9, 8), (1, 2), 7, (Guess(0, (0, 1, 2, 3, 4, 5, 6, 39)), Guess(NO_RANK, (9,) * 8)))
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({"vocabulary_size": 100, "traces": {"0.7": [encode(trace)]}}))
    assert load_corpus(path, 0.7) == Corpus(100, (trace,))


def test_an_unrecorded_temperature_is_refused(tmp_path):
    """Another one would be a silent lie."""
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({"vocabulary_size": 100, "traces": {"0.7": []}}))
    with pytest.raises(ConfigError, match=r"use one of 0\.7"):
        load_corpus(path, 0.5)


def test_a_replay_is_the_recorded_text_behind_the_sessions_number():
    """The number makes prompts differ; the text is untouched."""
    script = replay(CORPUS, 105, 3)
    assert script.tokens == (1, 5, 9, 8, 1, 2, 3)
    assert script.generated == (1, 2, 3)
    assert script.guess_at(4) == TRACE.guesses[0]
    assert script.guess_at(3) is None
    assert script.guess_at(7) is None


def test_a_written_script_has_the_lengths_asked_for():
    """Longer than one trace: another follows."""
    script = write_script(CORPUS, 3, prompt_length=12, length=9, random=Random(0))
    assert script.prompt_length == 12
    assert len(script.generated) == len(script.guesses) == 9
    assert script.tokens[:2] == (0, 3)


def test_the_recorded_pair_is_as_good_as_it_was_measured():
    """The draft's first guess is right less often the hotter the text."""
    shares = []
    for temperature in (0.0, 0.7, 1.0):
        guesses = load_corpus(FOLDER / "demo_pair.json", temperature).guesses
        shares.append(sum(guess.rank == 0 for guess in guesses) / len(guesses))
    assert 0.9 > shares[0] > shares[1] > shares[2] > 0.3


def test_a_large_vocabulary_becomes_a_small_one():
    """Equal tokens stay equal and others different, over all texts; guesses are untouched."""
    other = Trace((200_000,), (8, 150_000), 8, TRACE.guesses[:2])
    corpus = compact([TRACE, other])
    first, second = corpus.traces
    assert corpus.vocabulary_size == MIN_VOCABULARY
    assert len({*first.prompt, *first.tokens}) == 6
    assert second.tokens[0] == first.prompt[1]
    assert max(*second.prompt, *second.tokens) < MIN_VOCABULARY
    assert second.guesses == other.guesses
