"""What a model recommends for sampling, from its own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.engine.loading.model_path import GENERATION as FILE
from outrider.engine.loading.sampling_defaults import load_sampling_defaults, not_followed
from outrider.protocol.errors import ModelError


def test_the_files_own_values_are_taken(tmp_path: Path) -> None:
    """Those that a request could set; what is null or not there is left to the request's own defaults."""
    given = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": None, "repetition_penalty": 1.05}
    (tmp_path / FILE).write_text(json.dumps({**given, "eos_token_id": [1, 2], "max_new_tokens": 9}))
    (tmp_path / "config.json").write_text("{}")
    expected = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    assert load_sampling_defaults(str(tmp_path)) == expected


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    """As transformers decodes it: its temperature does not count."""
    (tmp_path / FILE).write_text(json.dumps({"temperature": 0.7, "repetition_penalty": 1.1}))
    (tmp_path / "config.json").write_text("{}")
    assert load_sampling_defaults(str(tmp_path)) == {"repetition_penalty": 1.1}


def test_what_the_file_asks_for_and_nobody_does_is_known(tmp_path: Path) -> None:
    """Tokens that it forbids, for example; what changes nothing, as files that say everything have it, is not
    named."""
    nothing = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": None, "min_length": 0}
    (tmp_path / FILE).write_text(json.dumps({**nothing, "num_beams": 1, "suppress_tokens": [7, 8]}))
    (tmp_path / "config.json").write_text("{}")
    assert not_followed(str(tmp_path)) == ["suppress_tokens"]
    (tmp_path / FILE).write_text(json.dumps({**nothing, "num_beams": 4}))
    assert not_followed(str(tmp_path)) == ["num_beams"]
    (tmp_path / FILE).write_text(json.dumps({"token_healing": False, "stop_strings": ["User:"]}))
    assert not_followed(str(tmp_path)) == ["stop_strings"]


@pytest.mark.parametrize(
    "setting",
    [
        {"min_new_tokens": 1},
        {"no_repeat_ngram_size": 1},
        {"forced_eos_token_id": 0},
        {"encoder_repetition_penalty": 1.5},
        {"watermarking_config": {"bias": 5.0}},
    ],
)
def test_small_values_may_change_tokens(tmp_path: Path, setting: dict[str, object]) -> None:
    """0 and 1 mean nothing only to some settings."""
    (tmp_path / FILE).write_text(json.dumps(setting))
    (tmp_path / "config.json").write_text("{}")
    assert not_followed(str(tmp_path)) == list(setting)


def test_older_models_have_them_in_their_configuration(tmp_path: Path) -> None:
    """As for transformers, where there is no file for them; what multimodal models say of text counts too."""
    text = {"repetition_penalty": 1.8, "suppress_tokens": [186], "top_k": 5}
    (tmp_path / "config.json").write_text(json.dumps({"top_k": 7, "text_config": text}))
    assert load_sampling_defaults(str(tmp_path)) == {"repetition_penalty": 1.8, "top_k": 7}
    assert not_followed(str(tmp_path)) == ["suppress_tokens"]
    (tmp_path / FILE).write_text("{}")
    assert load_sampling_defaults(str(tmp_path)) == {}


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    """The demo pair's has none either."""
    (tmp_path / "config.json").write_text("{}")
    assert load_sampling_defaults(str(tmp_path)) == {}
    demo = Path(__file__).resolve().parents[4] / "models/demo/target"
    assert load_sampling_defaults(str(demo)) == {}


@pytest.mark.parametrize(
    "values", [{"top_p": 7}, {"do_sample": True, "temperature": "warm"}, {"top_k": 2.5}, {"top_k": True}]
)
def test_a_value_that_no_request_may_have_is_refused(tmp_path: Path, values: dict[str, object]) -> None:
    """With what to do about it."""
    (tmp_path / FILE).write_text(json.dumps(values))
    with pytest.raises(ModelError, match="set generation_config to none") as refusal:
        load_sampling_defaults(str(tmp_path))
    name, value = list(values.items())[-1]
    assert name in str(refusal.value)
    assert repr(value) in str(refusal.value)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """Python's parser gives up with an error of its own."""
    (tmp_path / FILE).write_text("[" * 100_000)
    with pytest.raises(ModelError, match="is not JSON"):
        load_sampling_defaults(str(tmp_path))
