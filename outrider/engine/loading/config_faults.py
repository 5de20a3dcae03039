"""Finds values in a config.json that no model can have, and the field that an error of transformers is
about. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MINIMUMS = {
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "head_dim": 0,
    "intermediate_size": 0,
}
"""Whole numbers, unless they are lists with one for each layer, and the smallest that they may be."""
OBJECTS = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "factor")
"""Numbers above 0, the last two of the rotary settings."""
NUMBERS = (*POSITIVE[:-1], "rope_parameters", "rope_scaling")
"""Fields with numbers above 0, in themselves or in their members."""
SINGLE = int | float | str
"""What a value is that is not one for each layer."""
PADDING = "Padding_idx must be within num_embeddings"
"""What torch says of a padding token that has no embedding."""
UNKNOWN_TYPE = "does not recognize this architecture"
FIELD = re.compile(r"Validation error for field '(\w+)'")
CHECK = re.compile(r"Class validation error for validator '\w+': *(\w+: *)?")


def fault_of(config: Mapping[str, Any]) -> str:
    """What is wrong in a config.json, as a clause that names the field; empty if nothing is found."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    return next((fault for part in parts for fault in _faults(part)), "")


def fault_in(config: Mapping[str, Any], error: Exception) -> str:
    """What is wrong in a config.json by an error of transformers; empty if the error names no field of it."""
    said = " ".join(str(error).split())
    if found := FIELD.match(said):
        values = [value for path, value in _fields(config) if path.rpartition(".")[2] == found[1]]
        return f"{found[1]} is {values[0]!r}, which is of the wrong kind" if values else ""
    if found := CHECK.match(said):
        return said[found.end() :].removesuffix(".")
    if said == PADDING:
        values = [value for path, value in _fields(config) if path.endswith("pad_token_id")]
        given = f"{values[0]!r}, and" if values else "not set, and what its model_type has instead is"
        return f"pad_token_id is {given} no token of the vocabulary; write null"
    if UNKNOWN_TYPE in said:
        return f"model_type is {config.get('model_type')!r}, which this version of transformers does not know"
    missed = _missed(error)
    paths = [path for path, value in _fields(config) if missed and value == missed]
    return f"{paths[0]} is {missed!r}, which is not known" if paths else ""


def _missed(error: Exception) -> object:
    """The name that a library did not find; None if the error is about something else."""
    match error:
        case KeyError(args=(str() as name, *_)) | AttributeError(name=str() as name):
            return name
        case _:
            return None


def _faults(config: Mapping[str, Any]) -> Iterator[str]:
    for name, minimum in MINIMUMS.items():
        value = config.get(name)
        if isinstance(value, SINGLE) and (type(value) is not int or value < minimum):
            yield f"{name} is {value!r}, and must be a whole number of {minimum} or more"
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and groups > 0 and heads % groups:
        yield f"num_attention_heads is {heads}, which is no multiple of num_key_value_heads, {groups}"
    for name in OBJECTS:
        value = config.get(name)
        if value is not None and not isinstance(value, Mapping):
            yield f"{name} is {value!r}, and must be an object"
    for path, value in _fields({name: config.get(name) for name in NUMBERS}):
        if path.rpartition(".")[2] in POSITIVE and _is_no_number(value):
            yield f"{path} is {value!r}, and must be a number above 0"


def _is_no_number(value: object) -> bool:
    """Whether a value is a single one, and not above 0."""
    return isinstance(value, str) or (isinstance(value, int | float) and value <= 0)


def _fields(config: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of an object and of the objects in it, with their paths."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield f"{path}{name}", value
            yield from _fields(value, f"{path}{name}.")
