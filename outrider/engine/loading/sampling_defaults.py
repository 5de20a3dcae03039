"""Sampling parameters that a model's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.loading.model_path import CONFIG, GENERATION, find_file
from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.messages import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NOT_FOLLOWED: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "top_h", "stop_strings"), ()),
    "token_healing": (False,),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens"), (0,)),
    **dict.fromkeys(("min_length", "epsilon_cutoff", "eta_cutoff"), (0, 1)),
    **dict.fromkeys(("typical_p", "guidance_scale", "encoder_repetition_penalty", "num_beams"), (1,)),
}
"""Settings with which transformers writes another text, and which are not taken over; beside each, the values
that change nothing."""


def load_sampling_defaults(model: str) -> dict[str, float]:
    """Return the values of `NAMES` in the file of a model folder or hub id; unset names are left out.

    Raises:
        ModelError: the file cannot be read, or a value would be invalid in a request.
    """
    name, settings = _settings(model)
    return sampling_defaults(settings, model, name)


def not_followed(model: str) -> list[str]:
    """Return the settings in `NOT_FOLLOWED` that the file of a model folder or hub id sets.

    Raises:
        ModelError: the file cannot be read.
    """
    _, settings = _settings(model)
    return [name for name, same in NOT_FOLLOWED.items() if settings.get(name) not in (None, [], {}, *same)]


def _settings(model: str) -> tuple[str, dict[str, Any]]:
    """Return the file in which transformers looks for a model's settings, and what it says:
    generation_config.json, or config.json where there is no such file."""
    if find_file(model, GENERATION) is not None:
        return GENERATION, json_file(model, GENERATION)
    config = json_file(model, CONFIG)
    text = config.get("text_config")
    return CONFIG, {**(text if isinstance(text, dict) else {}), **config}


def sampling_defaults(settings: Mapping[str, Any], model: str, file: str = GENERATION) -> dict[str, float]:
    """See `load_sampling_defaults`."""
    found = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    if not settings.get("do_sample"):
        found.pop("temperature", None)  # without it transformers decodes greedily
    try:
        for name, value in found.items():
            if type(value) is not int and (name == "top_k" or type(value) is not float):
                raise InvalidRequest(name, f"must be a {'whole ' * (name == 'top_k')}number, not {value!r}")
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ModelError(
            f"model: {file} of {model!r}: {error}; repair it, or set generation_config to none"
        ) from error
    return found
