"""What a model's configuration says before any weight is read, and what cannot run here for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
from outrider.engine.loading.model_path import cannot_load, find_file
from outrider.engine.loading.own_attention import has_known_attention
from outrider.engine.recurrent.probing import recurrent_modules
from outrider.protocol.errors import ModelError

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
_STATELESS = {"moe", "mlp"}
"""Kinds of layers by the names that configurations give them."""
ADAPTER = "adapter_config.json"
"""The file of peft that says what is added to a model's weights."""
LOAD_ERRORS = (
    *(OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError),
    *(SafetensorError, StrictDataclassError, ArithmeticError),
)
"""What transformers raises for files that are missing, unreadable, too large or not a known model."""


def find_device(device: str) -> torch.device:
    """The device of a setting.

    Raises:
        ModelError: it is unknown, or not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device: {device!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ModelError(f"device: {device!r} asked for and {found} CUDA devices found; use cpu or auto")
    return place


def read_config(model: str, trust_remote_code: bool) -> PretrainedConfig:
    """A model's config.json.

    Raises:
        ModelError: it cannot be read, is of no known kind, or has an adapter beside it.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise unreadable(model, error) from error
    if find_file(model, ADAPTER) is not None:  # transformers adds it if peft is there, and else does not
        raise cannot_load(
            model,
            f"has an adapter ({ADAPTER}), which is not added to the weights here; merge it (peft: "
            "merge_and_unload, save_pretrained) or remove the file",
        )
    return config


def factory_of(config: PretrainedConfig) -> Any:
    """What makes a model of this configuration: one of texts, else one that takes images with them."""
    kind = type(config)
    images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def skeleton_of(model: str, config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The model without weights.

    Raises:
        ModelError: what is seen of it cannot run here.
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
    """Raises ModelError for kinds of layers that cannot run here, or not alone."""
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
    if kinds - _ATTENTION - _RECURRENT - _STATELESS:
        raise ModelError(
            f"{named} whose attention leaves out tokens in a way that is not computed here; use a model with "
            "full or sliding attention"
        )


def no_interface(network: PreTrainedModel) -> ModelError:
    """The error for a model that calls no attention of ours."""
    return ModelError(
        f"model: {type(network).__name__} does not let its attention be replaced (transformers' attention "
        "interface); use another architecture"
    )


SET_CONTEXT = "set one with --context-length, which `outrider up` has too"
"""What to do where a model names no context length."""


def find_context_length(config: PretrainedConfig, asked: int, say: Callable[[str], None]) -> int:
    """The most tokens of a sequence: the model's limit, less where its rotation changes with the length.

    Raises:
        ModelError: more are asked for, or there is no limit and none is.
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
        say(f"context cut from {limit} to {chunk} tokens: attention starts anew behind them")
        limit = chunk
    if asked > limit:
        raise ModelError(f"context_length: {asked} is more than the {limit} of the model; lower it")
    return int(asked or limit)


def context_limit(text: PretrainedConfig) -> int | None:
    """The most tokens that a configuration names; MPT, BLOOM and Kimi have names of their own for it."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "model_max_length")
    return next((limit for name in names if (limit := getattr(text, name, None))), None)


def rope_settings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Rotary settings: one set, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]


def eos_token_ids(network: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a text."""
    return _token_ids(network, "eos_token_id")


def generation_setting(network: PreTrainedModel, name: str) -> int | None:
    """A token id; None where there is none."""
    return next(iter(_token_ids(network, name)), None)


def _token_ids(network: PreTrainedModel, name: str) -> tuple[int, ...]:
    """Those that `generate` of transformers takes: of generation_config.json, and of config.json only where
    there is no such file. Some name what no token has, such as -1 for none.

    Raises:
        ModelError: they are no whole numbers.
    """
    given = getattr(network.generation_config, name, None)
    ids = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if not all(isinstance(id, int) for id in ids):
        raise ModelError(f"model: its {name} is {given!r}; write whole numbers in generation_config.json")
    return tuple(id for id in ids if 0 <= id < network.config.get_text_config().vocab_size)


def _cut_off(model: str) -> str:
    """Which file of weights is not whole, as after a download that broke."""
    for path in sorted(Path(model).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return f": {path.name} is not whole, fetch it again"
    return ""


def unreadable(model: str, error: Exception) -> ModelError:
    """The error for a model whose files cannot be read."""
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    if isinstance(error, StrictDataclassError):  # its first line names only the field
        reason = " ".join(str(error).split())
    if "trust_remote_code" in str(error):
        reason = "it has code of its own, which runs only with trust_remote_code"
    if isinstance(error, SafetensorError):
        reason += _cut_off(model)
    return cannot_load(model, f"cannot be loaded ({reason})")
