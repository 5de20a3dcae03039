"""Sampling parameters that a model's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.messages import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NOT_FOLLOWED = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "no_repeat_ngram_size"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "guidance_scale", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    "num_beams",
)
"""Settings with which transformers chooses other tokens, and which requests do not have."""


def load_sampling_defaults(model: str) -> dict[str, float]:
    """Return the values of `NAMES` in the file of a model folder or hub id; unset names are left out.

    Raises:
        ModelError: the file cannot be read, or a value would be invalid in a request.
    """
    return sampling_defaults(json_file(model, FILE), model)


def not_followed(model: str) -> list[str]:
    """Return the settings in `NOT_FOLLOWED` that the file of a model folder or hub id sets.

    Raises:
        ModelError: the file cannot be read.
    """
    settings = json_file(model, FILE)
    return [name for name in NOT_FOLLOWED if settings.get(name) not in (None, 0, 1, [], {})]


def sampling_defaults(settings: Mapping[str, Any], model: str) -> dict[str, float]:
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
            f"model: {FILE} of {model!r}: {error}; repair it, or set generation_config to none"
        ) from error
    return found
