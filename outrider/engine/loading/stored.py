"""Loads a model whose checkpoint is quantized, without the packages that quantized it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from outrider.engine.gpu.coded_linear import without_codes
from outrider.engine.loading.model_config import LOAD_ERRORS, read_config, skeleton_of, unreadable
from outrider.engine.loading.model_path import CONFIG
from outrider.engine.loading.open_weights import OpenWeights, by_module, without_mtp
from outrider.engine.quantization.checkpoint import Checkpoint, layout_of, read_checkpoint
from outrider.engine.quantization.layouts import Layout
from outrider.engine.quantization.modules import attach_codes, shapes_of_linears

FULL = "full"
"""The format of weights that are not quantized."""


def read_quantized(
    model: str, dtype: str, place: torch.device | None, trust_remote_code: bool, say: Callable[[str], None]
) -> tuple[PreTrainedModel, Any, str] | None:
    """Return the model on the CPU, transformers' report on its weights, and the name of the format.

    Its weights are the numbers that the codes stand for. If `place` is the CPU, layers have their codes too.
    On another place with kernels for codes, layers have their codes, and zeros that take no memory in place
    of numbers. Without a place layers have only numbers. Returns None if the checkpoint is not quantized, or
    if transformers reads it.

    Raises:
        ModelError: the format cannot be read.
    """
    config = read_config(model, trust_remote_code)
    layout = layout_of(model, config)
    if layout is None:
        return None
    kept = dtype_of(config, dtype)
    skeleton = skeleton_of(model, without_quantization(config), trust_remote_code)
    on_cpu = place is not None and place.type == "cpu"
    alone = place is not None and not on_cpu and without_codes(kept, place) is None
    with OpenWeights(model) as opened:
        weights = without_mtp(opened.weights, config.get_text_config().num_hidden_layers)
        modules = (
            (module, {name: weight[...] for name, weight in parts.items()})
            for module, parts in by_module(weights).items()
        )
        shapes = shapes_of_linears(skeleton) if alone else None
        found = read_checkpoint(model, layout, modules, kept, shapes)
    network, info = _with_tensors(type(skeleton), config, found.tensors, kept)
    read_generation_config(network, model)
    attach(network, found, layout, say, codes=alone or on_cpu, experts=on_cpu)
    return network, info, layout.name


def _with_tensors(
    kind: Any, config: PretrainedConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[PreTrainedModel, Any]:
    """Return a model of this class with these tensors, and transformers' report on them."""
    network, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the caller names them, where transformers only logs them
    )
    return network, info


def attach(
    network: PreTrainedModel,
    found: Checkpoint,
    layout: Layout,
    say: Callable[[str], None],
    *,
    codes: bool,
    experts: bool = False,
) -> None:
    """Attach the codes to layers, and to experts if `experts`, unless `codes` is false; report how many have
    none."""
    taken = attach_codes(network, found.codes, experts=experts) if codes else 0
    left = len(found.codes) + found.widened - taken
    if left:
        taken_16 = sum(weight.nbytes for weight in network.parameters()) / 1e9
        say(f"{left} {layout.name} layers become {network.dtype}; all weights take {taken_16:.1f} GB so")


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Return the same configuration without the settings of quantization."""
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    return config


def dtype_of(config: PretrainedConfig, asked: str) -> torch.dtype:
    """Return the dtype for the numbers of a quantized checkpoint: `asked`, or the configuration's if that is
    auto."""
    if asked != "auto":
        found: torch.dtype = getattr(torch, asked)
        return found
    named = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named))


def read_generation_config(network: PreTrainedModel, model: str) -> None:
    """Give a model its generation_config.json, or without one what its config.json says, as `from_pretrained`
    does.

    Raises:
        ModelError: it has values that no generation can have.
    """
    try:
        network.generation_config = _generation_config(model)
    except LOAD_ERRORS as error:
        raise unreadable(model, error) from error


def _generation_config(model: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is none
        return GenerationConfig.from_pretrained(model, config_file_name=CONFIG, _from_model_config=True)
