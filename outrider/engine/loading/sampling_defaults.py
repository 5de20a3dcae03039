"""Sampling parameters that a model's generation_config.json recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.loading.tokenizer_files import json_file
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.messages import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(model: str) -> dict[str, float]:
    """What the file of a model folder or hub id says of `NAMES`; what it does not say is left out.

    Raises:
        ModelError: the file cannot be read, or a value can be none of a request.
    """
    return sampling_defaults(json_file(model, FILE), model)


def sampling_defaults(settings: Mapping[str, Any], model: str) -> dict[str, float]:
    """See `load_sampling_defaults`."""
    found = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    if not settings.get("do_sample"):
        found.pop("temperature", None)  # transformers decodes greedily then, whatever it is
    try:
        if type(found.get("top_k", 0)) is not int:
            raise InvalidRequest("top_k", "must be a whole number")
        SamplingParams(**found)
    except (InvalidRequest, TypeError) as error:
        raise ModelError(
            f"model: {FILE} of {model!r}: {error}; repair it, or set generation_config to none"
        ) from error
    return found
