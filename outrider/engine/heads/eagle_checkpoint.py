"""The tensors of an EAGLE-3 head, and those that it shares with its target. A tensor without a place is an
error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.engine.heads.eagle_config import HeadConfig, describe_head
from outrider.engine.loading.model_config import sound_config
from outrider.engine.loading.model_path import CONFIG
from outrider.engine.loading.open_weights import OpenWeights, Weight
from outrider.engine.loading.tokenizer_files import json_file
from outrider.engine.quantization.layouts import is_fp8
from outrider.protocol.errors import ModelError

LAYER = "layers.0."
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
OPTIONAL = ("d2t", "t2d", EMBEDDING, OUTPUT)


def read_head(model: str, target: str) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return a head and its tensors by their names without `model.`, the layer's under `layers.0.`.
    `embed_tokens.weight`, `lm_head.weight` and `d2t` are always there; where the head shares them, they are
    the target's own.

    Raises:
        ModelError: a file is missing or not in the safetensors format, a config.json is wrong, or a tensor
        is missing, unknown or of another shape.
    """
    config = describe_head(model, json_file(model, CONFIG), sound_config(target))
    shapes = _shapes(config)
    with OpenWeights(model) as opened:
        found = {_plain(name): weight[...] for name, weight in opened.weights.items()}
    for name in found:
        if name not in shapes:
            raise ModelError(
                f"model: {model!r} has a tensor {name!r} that an EAGLE-3 head has not; use another head"
            )
    endings = {EMBEDDING: (EMBEDDING,), OUTPUT: (OUTPUT, EMBEDDING)}
    if lacking := sorted(endings.keys() - found.keys()):
        with OpenWeights(target) as opened:
            found |= {name: _shared(target, opened.weights, *endings[name]) for name in lacking}
    found.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    for name, shape in shapes.items():
        _check(model, name, found.get(name), shape)
    _check_map(model, found["d2t"], config)
    return config, found


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's tensors by name."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.feature_layers) * config.target_hidden_size),
        "norm.weight": (width,),
        OUTPUT: (config.draft_vocab_size, width),
        EMBEDDING: (config.vocab_size, width),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
        LAYER + "self_attn.o_proj.weight": (width, queries),
        LAYER + "mlp.gate_proj.weight": (inner, width),
        LAYER + "mlp.up_proj.weight": (inner, width),
        LAYER + "mlp.down_proj.weight": (width, inner),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{LAYER}{name}.weight"] = (width,)
    for name, count in rows.items():
        shapes[f"{LAYER}self_attn.{name}.weight"] = (count, 2 * width)
        if config.attention_bias:
            shapes[f"{LAYER}self_attn.{name}.bias"] = (count,)
    if config.attention_bias:
        shapes[LAYER + "self_attn.o_proj.bias"] = (width,)
    return shapes


def _check(model: str, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None:
        if name not in OPTIONAL:
            raise ModelError(
                f"model: {model!r} lacks the tensor {name!r} of an EAGLE-3 head; use a whole checkpoint"
            )
    elif tuple(tensor.shape) != shape:
        raise ModelError(
            f"model: the tensor {name!r} of {model!r} has the shape {list(tensor.shape)}, not "
            f"{list(shape)} as config.json says; use a head that was trained for this target"
        )


def _check_map(model: str, d2t: Tensor, config: HeadConfig) -> None:
    """Check that every token of the draft is one of the target's, whose id is the draft's id plus its entry
    in `d2t`."""
    tokens = d2t + torch.arange(config.draft_vocab_size)
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ModelError(
            f"model: the tensor 'd2t' of {model!r} leads out of the vocabulary of {config.vocab_size}"
        )


def _plain(name: str) -> str:
    """Return the common name of a tensor that SpecForge, SGLang and vLLM name differently."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _shared(target: str, weights: Mapping[str, Weight], *endings: str) -> Tensor:
    """Return the first of the target's tensors whose name has one of these endings; earlier endings go
    first."""
    for ending in endings:
        for name, weight in weights.items():
            if name == ending or name.endswith("." + ending):
                return _numbers(target, name, weight[...])
        layer = ending.removesuffix("weight")
        if coded := next((name for name in weights if layer in name), None):
            raise _coded(target, coded)
    raise ModelError(
        f"target: {target!r} has no tensor {endings[0]!r}, which the head does not bring; use a whole head"
    )


def _numbers(target: str, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers need no scales."""
    if is_fp8(tensor) or not tensor.is_floating_point():
        raise _coded(target, name)
    return tensor


def _coded(target: str, name: str) -> ModelError:
    return ModelError(
        f"target: the tensor {name!r} of {target!r} is quantized, and the head does not bring its own; use a "
        "whole head"
    )
