"""How many numbers of keys and values a model keeps for one token, by its configuration. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WITHOUT_ATTENTION = {"linear_attention", "mamba", "conv", "moe", "mlp"}
"""Kinds of layers without attention, as configurations name them."""
_WITHOUT_LATENTS = ("kimi_linear", "bailing_hybrid", "minicpm3", "longcat_flash")
"""Models with latent attention that run as their own modules. These pass whole keys and values to
attention."""


def kept_numbers(config: Any) -> int:
    """Numbers of one token in all layers, or of the latents that keys and values are made of."""
    return _of_layers(config, _layer_numbers)


def whole_numbers(config: Any) -> int:
    """Numbers of one token's whole keys and values in all layers."""
    return _of_layers(config, _whole_numbers)


def _of_layers(config: Any, of_layer: Callable[[Any], int]) -> int:
    """Numbers per token of all layers with attention, without those that use another layer's keys and
    values (Gemma 4)."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layers)
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    return sum(
        of_layer(layer)
        for layer, mode, kind in zip(layers, modes, kinds, strict=True)
        if mode != "reuse" and kind not in _WITHOUT_ATTENTION
    )


def _layer_numbers(config: Any) -> int:
    latent: int | None = getattr(config, "kv_lora_rank", None)
    if latent and config.model_type not in _WITHOUT_LATENTS:
        return latent + int(config.qk_rope_head_dim)
    return _whole_numbers(config)


def _whole_numbers(config: Any) -> int:
    alibi = config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if alibi:  # the keys of each query head carry its own positions
        heads = config.num_attention_heads
    elif config.model_type == "falcon" and (config.new_decoder_architecture or config.multi_query):
        heads = config.num_kv_heads if config.new_decoder_architecture else 1
    if getattr(config, "qk_nope_head_dim", None):  # in latent attention (DeepSeek), keys have two parts
        width: int = config.qk_nope_head_dim + config.qk_rope_head_dim
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    carried = 2 if alibi else 0  # extra columns of keys that hold their positions
    value_width = getattr(config, "v_head_dim", None) or width
    if config.model_type == "diffllama":  # both halves of the values lie in each head
        value_width *= 2
    return int(heads * (width + carried + value_width))
