"""Reads a model's configuration before any weight is read, and refuses what cannot run here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from outrider.engine.loading.alibi import uses_alibi
from outrider.engine.loading.config_faults import fault_in, fault_of
from outrider.engine.loading.model_path import CONFIG, GENERATION, cannot_load, find_file
from outrider.engine.loading.own_attention import has_known_attention
from outrider.engine.loading.tokenizer_files import json_file
from outrider.engine.recurrent.probing import recurrent_modules
from outrider.out_of_memory import lacks_memory
from outrider.protocol.errors import ModelError, first_line
from outrider.threads import NO_THREAD

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
_STATELESS = {"moe", "mlp"}
"""Kinds of layers, with the names that configurations use."""
ADAPTER = "adapter_config.json"
"""The file in which peft says what is added to a model's weights."""
LOAD_ERRORS = (
    *(OSError, MemoryError, ValueError, ImportError, RuntimeError, LookupError, TypeError, AttributeError),
    *(SafetensorError, StrictDataclassError, ArithmeticError, AssertionError),
)
"""The errors of transformers for files that are missing, unreadable, too large or not a known model."""


def find_device(device: str) -> torch.device:
    """Return the device that a setting names.

    Raises:
        ModelError: the device is unknown, or does not exist here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        if place.type not in ("cpu", "cuda"):
            torch.zeros(1, device=place).tolist()  # torch knows the names of devices that are not here
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device: {device!r} is unknown or not in this machine; use auto, cpu, cuda or cuda:N"
        ) from error
    wrapped = str(place) != device  # torch keeps 8 bits of the number
    if place.type == "cuda" and (wrapped or (place.index or 0) >= torch.cuda.device_count()):
        raise ModelError(f"device: {device!r} asked for and {_devices()} found; use cpu or auto")
    # With its number, as tensors on it have it: what is known of a device is then found again.
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def _devices() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
    return f"{torch.cuda.device_count()} CUDA devices{limit}"


def usable(place: torch.device) -> torch.device:
    """Return a device on which memory can be taken. On a GPU this begins to use it.

    Raises:
        ModelError: the driver is too old, or other processes have the GPU or all of its memory.
    """
    if place.type == "cuda":
        try:
            torch.cuda.mem_get_info(place)
        except RuntimeError as error:
            raise ModelError(
                f"device: {place} cannot be used ({first_line(error)}); see nvidia-smi, or use another device"
            ) from error
    return place


def sound_config(model: str) -> dict[str, Any]:
    """Return a model's config.json as it is; empty if there is none.

    Raises:
        ModelError: it cannot be read, or has a value that no model can have.
    """
    config = json_file(model, CONFIG)
    if fault := fault_of(config):
        raise wrong_config(model, fault)
    return config


def read_config(model: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return a model's config.json.

    Raises:
        ModelError: it cannot be read, is of no known kind, or lies next to an adapter.
    """
    json_file(model, GENERATION)  # says what is wrong with it better than transformers does
    sound_config(model)
    if find_file(model, ADAPTER) is not None:  # transformers adds it only if peft is installed
        raise cannot_load(
            model,
            f"has an adapter ({ADAPTER}), which is not added to the weights here; merge it (peft: "
            "merge_and_unload, save_pretrained) or remove the file",
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise unreadable(model, error) from error
    return config


def factory_of(config: PretrainedConfig) -> Any:
    """Return the factory for models of this configuration: one for texts if there is one, otherwise for texts
    with images."""
    kind = type(config)
    images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def skeleton_of(model: str, config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model without weights.

    Raises:
        ModelError: the model cannot run here, as far as its modules show.
    """
    if config.is_encoder_decoder:
        raise ModelError(f"model: {model!r} is an encoder-decoder; use a decoder-only model")
    try:
        with torch.device("meta"):
            factory = factory_of(config)
            skeleton: PreTrainedModel = factory.from_config(config, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise unreadable(model, error) from error
    takes_positions = "position_ids" in inspect.signature(skeleton.forward).parameters
    _check_layers(skeleton, takes_positions)
    known = has_known_attention(skeleton)
    if not known and not skeleton._can_set_attn_implementation():
        raise no_interface(skeleton)
    kind = type(skeleton).__name__
    if not takes_positions and not (known and uses_alibi(skeleton)):
        raise ModelError(
            f"model: {kind} takes no positions of tokens, without which it cannot compute several candidates "
            "at once; use another architecture"
        )
    return skeleton


def _check_layers(skeleton: PreTrainedModel, takes_positions: bool) -> None:
    """Raise ModelError for kinds of layers that cannot run here, or not without attention layers."""
    kinds = set(getattr(skeleton.config.get_text_config(), "layer_types", None) or ())
    named = f"model: {type(skeleton).__name__} has layers ({', '.join(sorted(kinds)) or 'recurrent'})"
    if getattr(skeleton, "_is_stateful", False) or kinds & _RECURRENT:
        if not recurrent_modules(skeleton):
            raise ModelError(f"{named} whose states are not known here; use another architecture")
        if not takes_positions:
            raise ModelError(
                f"model: {type(skeleton).__name__} has no attention beside its recurrent layers; use another "
                "architecture"
            )
    if any(hasattr(module, "is_causal") and recurrent_modules(module) for module in skeleton.modules()):
        raise ModelError(
            f"model: {type(skeleton).__name__} has convolutions inside its attention, whose states are not "
            "kept here; use another architecture"
        )
    if kinds - _ATTENTION - _RECURRENT - _STATELESS:
        raise ModelError(
            f"{named} whose attention leaves out tokens in a way that is not computed here; use a model with "
            "full or sliding attention"
        )


def no_interface(network: PreTrainedModel) -> ModelError:
    """Return the error for a model whose attention cannot be replaced."""
    return ModelError(
        f"model: {type(network).__name__} does not let its attention be replaced (transformers' attention "
        "interface); use another architecture"
    )


SET_CONTEXT = "set one with --context-length, which `outrider up` has too"
"""What to do where a model names no context length."""


def find_context_length(config: PretrainedConfig, asked: int, say: Callable[[str], None]) -> int:
    """Return the most tokens of a sequence: the model's limit, or fewer where its rotation changes with the
    length.

    Raises:
        ModelError: `asked` is more than the limit, or there is no limit and `asked` is 0.
    """
    text = config.get_text_config()
    limit = context_limit(text)
    if limit is None:
        if not asked:
            raise ModelError(f"context_length: config.json of the model names none; {SET_CONTEXT}")
        return asked
    for rope in rope_settings(text):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original is not None and original < limit:
            say(f"context cut from {limit} to {original} tokens: this rope changes all positions beyond it")
            limit = original
    chunk = getattr(text, "attention_chunk_size", None)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()) and chunk and chunk < limit:
        say(f"context cut from {limit} to {chunk} tokens: attention starts anew after them")
        limit = chunk
    if getattr(text, "attn_temperature_tuning", False) and text.floor_scale < limit:
        say(f"context cut from {limit} to {text.floor_scale} tokens: queries are scaled after them")
        limit = text.floor_scale
    if asked > limit:
        raise ModelError(f"context_length: {asked} is more than the {limit} of the model; lower it")
    return int(asked or limit)


def without_scales(network: PreTrainedModel) -> None:
    """Turn off the factors by which Llama 4 scales queries: they follow a row's place in the batch, not its
    position. Within the context of `find_context_length` all of them are 1."""
    modules: Iterable[Any] = network.modules()
    for module in modules:
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False


def context_limit(text: PretrainedConfig) -> int | None:
    """Return the context length in a configuration; MPT, BLOOM and Kimi have names of their own for it."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "model_max_length")
    return next((limit for name in names if (limit := getattr(text, name, None))), None)


def rope_settings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary settings: one set, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]


def eos_token_ids(network: PreTrainedModel) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text."""
    return _token_ids(network, "eos_token_id")


def bos_token_id(network: PreTrainedModel) -> int | None:
    """Return the id of the token that begins a text; None if there is none."""
    return next(iter(_token_ids(network, "bos_token_id")), None)


def _token_ids(network: PreTrainedModel, name: str) -> tuple[int, ...]:
    """Return the token ids that `generate` of transformers uses: those in generation_config.json, or those in
    config.json if there is no such file. See `token_ids`."""
    given = getattr(network.generation_config, name, None)
    return token_ids(name, given, network.config.get_text_config().vocab_size)


def token_ids(name: str, given: Any, vocabulary_size: int) -> tuple[int, ...]:
    """Return the token ids in a field of a model's files: one, several or None. Ids that no token has, such
    as -1 for none, are left out.

    Raises:
        ModelError: they are not integers.
    """
    ids = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if not all(isinstance(id, int) for id in ids):
        raise ModelError(f"model: its {name} is {given!r}; write whole numbers in {GENERATION}")
    return tuple(id for id in ids if 0 <= id < vocabulary_size)


def _cut_off(model: str) -> str:
    """Return text that names an incomplete file of weights, as after a broken download."""
    for path in sorted(Path(model).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return f": {path.name} is not whole, fetch it again"
    return ""


def wrong_config(model: str, fault: str) -> ModelError:
    """The error for a model whose config.json has a fault."""
    return ModelError(f"model: {CONFIG} of {model!r}: {fault}; repair it, or give another model")


def other_shape(model: str, name: str, stored: Iterable[int], shape: Iterable[int]) -> ModelError:
    """The error for a weight that has another shape than the configuration says."""
    return ModelError(
        f"model: {model!r} has a {name} of {tuple(stored)}, and by its config.json it is {tuple(shape)}; use "
        "the config.json that belongs to the weights"
    )


def without_room(error: Exception) -> ModelError | None:
    """The error for a model that has too little memory or too few threads; None when `error` is about
    something else."""
    if NO_THREAD in str(error):
        return ModelError(f"model: {NO_THREAD}; raise the limit (ulimit -u), or end other processes")
    if not lacks_memory(error):
        return None
    return ModelError(
        f"model: does not fit into the free memory ({first_line(error)}); end other processes, or take a "
        "smaller model"
    )


def unreadable(model: str, error: Exception) -> ModelError:
    """The error for a model whose files cannot be read."""
    if lack := without_room(error):
        return lack
    if fault := fault_in(json_file(model, CONFIG), error):
        return wrong_config(model, fault)
    reason = first_line(error)
    if isinstance(error, KeyError):
        reason = f"{reason} is missing in one of its files"
    if "trust_remote_code" in str(error):
        reason = "it has code of its own, which runs only with trust_remote_code"
    if isinstance(error, SafetensorError):
        reason += _cut_off(model)
    return cannot_load(model, f"cannot be loaded ({reason})")
