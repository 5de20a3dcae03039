"""Random EAGLE-3 heads, saved as their trainers save them, and what they compute, spelled out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = (0, 1)
"""Whose outputs the heads read; what goes into layers 1 and 2."""
DRAFT_TOKENS = 40
EPS = 1e-5


def head_config(vocabulary: int = 300, **changes: Any) -> dict[str, Any]:
    """A config.json as SpecForge writes it, for a target of width 64."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": vocabulary,
        "draft_vocab_size": DRAFT_TOKENS,
        "target_hidden_size": 64,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    } | changes


def head_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors for it, under SpecForge's names; the head's tokens are 5, 10, 15 and so on."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.25

    shapes = {
        "fc.weight": (64, len(LAYERS) * 64),
        "lm_head.weight": (DRAFT_TOKENS, 64),
        "midlayer.self_attn.q_proj.weight": (64, 128),
        "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128),
        "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.mlp.gate_proj.weight": (96, 64),
        "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors = {name: random(*shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1.0 + random(64) for name in norms}
    tokens = torch.arange(1, DRAFT_TOKENS + 1) * 5
    t2d = torch.zeros(300, dtype=torch.bool)
    t2d[tokens] = True
    return tensors | {"d2t": tokens - torch.arange(DRAFT_TOKENS), "t2d": t2d}


def save_head(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """A checkpoint in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_head(folder: Path, **changes: Any) -> Path:
    """A random head for a target of `tests.models`."""
    return save_head(folder, head_tensors(), head_config(**changes))


class PlainHead:
    """What a head computes, without anything that is fused, packed or kept. N rows, C = 64."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.w = load_file(folder / "model.safetensors")
        shared = load_file(target / "model.safetensors")
        self.embedding = shared["model.embed_tokens.weight"].float()

    def fuse(self, features: Tensor) -> Tensor:
        """[N, layers C] -> [N, C]."""
        return features.float() @ self.w["fc.weight"].T

    def __call__(
        self, tokens: Sequence[int], features: Tensor, positions: Sequence[int], seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features [N, C] and a mask [N, N] -> features of the next rows [N, C] and log-odds of all tokens
        [N, V]."""
        w = {name.removeprefix("midlayer."): tensor for name, tensor in self.w.items()}
        embedded = torch.stack([self.embedding[token] for token in tokens])
        both = [_norm(embedded, w["input_layernorm.weight"]), _norm(features, w["hidden_norm.weight"])]
        x = torch.cat(both, 1)
        q, k, v = (x @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = []
        for head in range(4):
            own, group = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
            query, key = _turned(q[:, own], positions), _turned(k[:, group], positions)
            scores = (query @ key.T / 4).masked_fill(~seen, -math.inf)
            mixed.append(scores.softmax(-1) @ v[:, group])
        hidden = features + torch.cat(mixed, 1) @ w["self_attn.o_proj.weight"].T
        y = _norm(hidden, w["post_attention_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
        few = _norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T
        logits = torch.full((len(tokens), len(self.embedding)), -math.inf)
        for own_id, offset in enumerate(w["d2t"].tolist()):
            logits[:, own_id + offset] = few[:, own_id]
        return hidden, logits

    def chain(self, tokens: Sequence[int], features: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The last row of a text whose tokens from position `first` on have features [N, C]."""
        count = len(features)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        positions = range(first, first + count)
        hidden, logits = self(tokens[first : first + count], features, list(positions), seen)
        return hidden[-1], logits[-1]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _turned(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Pairs (i, i + 8) of a head of 16, turned by their position."""
    rows = []
    for row, position in zip(x, positions, strict=True):
        angles = [position * 10000.0 ** (-i / 8) for i in range(8)]
        turned = [row[i] * math.cos(a) - row[i + 8] * math.sin(a) for i, a in enumerate(angles)]
        turned += [row[i + 8] * math.cos(a) + row[i] * math.sin(a) for i, a in enumerate(angles)]
        rows.append(torch.stack(turned))
    return torch.stack(rows)
