"""A small model of the same kind as a large one, for the check at load: no process holds the whole large
model."""

from __future__ import annotations

import copy
from math import gcd
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outrider.engine.fused_decoder import NotFused
from outrider.engine.fused_decoder.shares import shares_of
from outrider.engine.loaded_model import Geometry
from outrider.engine.loading.model_config import factory_of
from outrider.engine.quantization.rounding import GROUP


def small_config(
    config: PretrainedConfig, geometry: Geometry, ranks: int, trust_remote_code: bool
) -> PretrainedConfig:
    """Return the configuration of a small model of the same kind, with heads of the same width.

    It has a layer of each kind, and a vocabulary that the ranks do not share evenly. Where queries share kv
    heads it has all heads. Otherwise it has as few heads as the ranks can share, because some kinds are as
    wide as their heads together.
    """
    made = copy.deepcopy(config)
    text, layers = made.get_text_config(), sorted(set(first_alike(config)))
    layers = layers if len(layers) > 1 else layers * 2
    for name, entries in _of_layers(text).items():
        setattr(text, name, [entries[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    text.head_dim = geometry.head_dim
    text.hidden_size = 64
    if geometry.queries_per_kv == 1:
        _set_heads(text, geometry, ranks)
    text.intermediate_size = GROUP * ranks
    if hasattr(text, "moe_intermediate_size"):
        text.moe_intermediate_size = text.intermediate_size
    text.vocab_size = 64 * ranks - 1
    text.pad_token_id = None  # may be outside this vocabulary
    if not _has_heads(made, geometry.head_dim, trust_remote_code):
        text.hidden_size = text.num_attention_heads * geometry.head_dim
    return made


def first_alike(config: PretrainedConfig) -> list[int]:
    """Return for each layer the first layer of its kind: both have the same entries in the configuration."""
    text = config.get_text_config()
    kinds = list(zip(*_of_layers(text).values(), strict=True)) or [()] * text.num_hidden_layers
    return [kinds.index(kind) for kind in kinds]


def _of_layers(text: PretrainedConfig) -> dict[str, list[Any]]:
    """Return the settings that have an entry for each layer."""
    return {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == text.num_hidden_layers
    }


def _set_heads(text: Any, geometry: Geometry, ranks: int) -> None:
    in_groups = GROUP // gcd(GROUP, geometry.head_dim)
    text.num_attention_heads = ranks * min(in_groups, geometry.query_heads // ranks)
    if hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = text.num_attention_heads
    text.hidden_size = text.num_attention_heads * geometry.head_dim


def _has_heads(config: PretrainedConfig, width: int, trust_remote_code: bool) -> bool:
    """True where heads have the width that the configuration says, not a part of the hidden width."""
    try:
        with torch.device("meta"):
            factory = factory_of(config)
            network = factory.from_config(config, trust_remote_code=trust_remote_code)
        geometry, _ = shares_of(network)
    except (ValueError, NotFused):  # such heads are no part of the small width
        return False
    return geometry.head_dim == width


def random_network(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return a model with random weights, the same on every rank and large enough that tokens differ."""
    generator = torch.Generator().manual_seed(0)
    factory = factory_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some weights, such as sinks, are initialised randomly
        network: Any = factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    for weight in network.parameters():
        if weight.ndim == 1:  # norms and biases, most of which begin as ones and zeros
            weight.data += torch.empty_like(weight).uniform_(-0.25, 0.25, generator=generator)
        else:
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    evaluated: PreTrainedModel = network.requires_grad_(False).eval()
    return evaluated
