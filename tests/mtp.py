"""Random MTP layers, added to the checkpoints of tiny targets under the names of published ones, and what
transformers computes with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.models import build_model

TARGETS = ("deepseek_v3", "glm4_moe_lite", "qwen3_5", "qwen3_next")
"""Architectures whose published checkpoints have an MTP layer."""
_APART = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}


def build_target(architecture: str, folder: Path, **changes: Any) -> PlainMtp:
    """Save a random target with an MTP layer; return what transformers computes with that layer."""
    build_model(architecture, folder, **changes)
    return add_layer(folder)


def add_layer(folder: Path, seed: int = 0) -> PlainMtp:
    """Add a random MTP layer to a target's checkpoint; return what transformers computes with that layer."""
    plain = PlainMtp(folder)
    draw = torch.Generator().manual_seed(seed)
    for parameter in plain.layer.parameters():
        noise = torch.randn(parameter.shape, generator=draw) * 0.25
        parameter.data.copy_(1.0 + noise if parameter.dim() == 1 else noise)
    add_weights(folder, plain.layer.state_dict())
    return plain


def add_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Add an MTP layer's weights, named as transformers' `MtpLayer` names them, to a target's checkpoint."""
    config, path = AutoConfig.from_pretrained(folder), folder / "model.safetensors"
    names = _apart if config.model_type.startswith(("qwen", "mellum")) else _behind
    save_file(load_file(path) | names(weights, config.num_hidden_layers), path, {"format": "pt"})


class PlainMtp:
    """An MTP layer as transformers computes it, in float32. N rows of width C."""

    def __init__(self, folder: Path) -> None:
        """The target in a folder, and a new MTP layer."""
        config: Any = AutoConfig.from_pretrained(folder)
        config.num_mtp_layers = 1
        if getattr(config, "layer_types", None):
            config.mtp_layer_types = getattr(config, "mtp_layer_types", None) or ["full_attention"]
        if getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = ["sparse"]
        main: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        self.main = main.eval()
        self.model: Any = MtpModel(main, 1).requires_grad_(False).eval()
        self.layer = self.model.layers[0]

    def __call__(
        self, tokens: Sequence[int], features: Tensor, positions: Sequence[int], seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features [N, C] and a mask [N, N] -> features of the next rows [N, C] and logits [N, V]."""
        embedded = self.main.get_input_embeddings()(torch.tensor([list(tokens)]))
        places, rotary = torch.tensor([list(positions)]), self.main.get_decoder().rotary_emb
        axes = places.expand(3, *places.shape) if hasattr(rotary, "mrope_section") else places
        per_kind = getattr(self.model, "has_per_layer_rope", False)
        kind = {"layer_type": self.model.config.layer_types[0]} if per_kind else {}
        with torch.no_grad():
            hidden = self.layer(
                embedded,
                features[None],
                position_embeddings=rotary(embedded, position_ids=axes, **kind),
                attention_mask=seen[None, None],
                position_ids=places,
                past_key_values=None,
            )
            return hidden[0], self.main.lm_head(hidden)[0]

    def below(self, tokens: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """Logits [V] below a path, each of whose rows takes the result of the row above it. `features` are
        those of the text's `tokens` from the second one on."""
        text, rows = [*tokens[1:]], features
        for node in (*path, None):
            seen = torch.ones(len(text), len(text), dtype=torch.bool).tril()
            hidden, logits = self(text, rows, range(1, len(text) + 1), seen)
            if node is not None:
                text, rows = [*text, node], torch.cat([rows, hidden[-1:]])
        return logits[-1]


def _behind(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Names as DeepSeek's and GLM's: the layer follows the target's."""
    places = {"post_norm.weight": "shared_head.norm.weight"}
    return {
        f"model.layers.{layers}.{places.get(name, name.removeprefix('mtp_block.'))}": tensor
        for name, tensor in _experts_apart(weights).items()
    }


def _apart(weights: dict[str, Tensor], _: int) -> dict[str, Tensor]:
    """Names as Qwen's: the layer has a prefix of its own."""
    found = {}
    for name, tensor in _experts_apart(weights).items():
        first, _, rest = name.partition(".")
        inner = f"layers.0.{rest}" if first == "mtp_block" else f"{_APART[first]}.{rest}"
        found[f"mtp.{inner}"] = tensor
    return found


def _experts_apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as checkpoints have them, each with its own tensors."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stacked = re.fullmatch(r"(.*mlp\.experts)\.(gate_up_proj|down_proj)", name)
        if stacked is None:
            found[name] = tensor
            continue
        for number, one in enumerate(tensor):
            parts = {"gate_proj": one.chunk(2)[0], "up_proj": one.chunk(2)[1]}
            if stacked[2] == "down_proj":
                parts = {"down_proj": one}
            for part, own in parts.items():
                found[f"{stacked[1]}.{number}.{part}.weight"] = own.contiguous()
    return found
