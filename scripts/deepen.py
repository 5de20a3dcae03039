"""Embed a Llama checkpoint in one of more layers and wider ones without changing what it computes.

The added numbers of the residual stream stay 0: embeddings, output projections and norms have zeros there.
The added heads are not read, and the added layers write nothing. All weights that are free are random. So a
small trained model gets the shape and the time per token of a large one, and its drafts are still accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.widen import copy_tokenizer, load


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the larger model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


LARGE = Shape(hidden=2048, layers=22, heads=32, kv_heads=16, intermediate=5632)
"""Makes 1,047 M parameters of the demo target, shaped like other models of that size."""
LARGER = Shape(hidden=3072, layers=28, heads=48, kv_heads=24, intermediate=8192)
"""Makes 2,919 M parameters of it."""
LARGE_DRAFT = Shape(hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536)
"""Makes 109 M parameters of the demo draft, a tenth of its target's as is usual."""


def deepen(source: Path, destination: Path, shape: Shape) -> int:
    """Write the larger checkpoint and return its number of parameters.

    Raises:
        ValueError: the checkpoint is no Llama, or the shape has no room for it.
    """
    config = json.loads((source / "config.json").read_text())
    _check(config, shape)
    weights = load(source)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: _grown(name, weights, size, config, generator)
        for name, size in _sizes(config, shape, weights).items()
    }
    destination.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(source, destination)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    config["rms_norm_eps"] *= config["hidden_size"] / shape.hidden
    config |= {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers}
    config |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config |= {"intermediate_size": shape.intermediate, "max_position_embeddings": 8192}
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")  # last: marks it complete
    return sum(weight.numel() for weight in tensors.values())


def _check(config: dict[str, Any], shape: Shape) -> None:
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    before = [config.get(name, 0) for name in names]
    after = [shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.intermediate]
    if config.get("model_type") != "llama" or "head_dim" not in config:
        raise ValueError("the checkpoint has to be a Llama whose config.json has a head_dim")
    if any(small > large for small, large in zip(before, after, strict=True)):
        raise ValueError(f"{names} are {before} and must not be larger than {after}")
    if before[2] * shape.kv_heads != shape.heads * before[3]:
        raise ValueError("heads ÷ kv_heads has to stay the same")


def _sizes(config: dict[str, Any], shape: Shape, weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the larger model."""
    queries, keys = shape.heads * config["head_dim"], shape.kv_heads * config["head_dim"]
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    layers = {
        f"model.layers.{layer}.{name}.weight": size
        for layer in range(shape.layers)
        for name, size in of_layer.items()
    }
    ends = {
        name: (config["vocab_size"], shape.hidden) for name in weights if "embed" in name or "head" in name
    }
    return {**ends, **layers, "model.norm.weight": (shape.hidden,)}


def _grown(
    name: str,
    weights: dict[str, Tensor],
    size: tuple[int, ...],
    config: dict[str, Any],
    generator: torch.Generator,
) -> Tensor:
    """A weight in its new size."""
    before = weights.get(name)
    dtype = weights["model.norm.weight"].dtype
    if len(size) == 1:
        if before is None:
            return torch.ones(size, dtype=dtype)
        # The mean square over more numbers is smaller, and so is what a norm divides by.
        before = before * (config["hidden_size"] / size[0]) ** 0.5
        return torch.nn.functional.pad(before, (0, size[0] - len(before))).to(dtype)
    grown = torch.zeros(size, dtype=dtype)
    if name.endswith(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    ):
        grown.copy_(torch.randn(size, generator=generator) * config["initializer_range"])
    if before is not None:
        grown[: before.shape[0], : before.shape[1]] = before
    return grown
