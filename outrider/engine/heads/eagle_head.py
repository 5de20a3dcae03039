"""The computation of an EAGLE-3 head: one layer over pairs of a token and the target's feature of the token
before.

    fuse      the target's layers side by side -> one feature
    rows      token and feature -> queries, keys and values
    mix       queries over the rows that they see
    outputs   the layer's result: the feature of the next row of a chain, and logits of the target's tokens

Li and others 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test".

Shapes: N rows, C width of the head, Q query heads, H kv heads, D head width, F width of the MLP, V vocabulary
of the target, L rows that are seen.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.engine.cpu.layer import Angles
from outrider.engine.fused_decoder.decoder import Gate, Norm
from outrider.engine.fused_decoder.joining import linear_of
from outrider.engine.fused_decoder.norm import RowNorm
from outrider.engine.fused_decoder.rotation import Rotations, rotate
from outrider.engine.heads.base import Attend, Head, Rows
from outrider.engine.heads.eagle_checkpoint import EMBEDDING, LAYER, OUTPUT
from outrider.engine.heads.eagle_config import HeadConfig

GATE = "gate.gate_up"
"""The name of the linear layer whose product may apply its gate."""


class EagleHead(Head):
    """An EAGLE-3 head with its weights."""

    kind = "eagle"

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`tensors` are those of `read_head`."""
        super().__init__()
        placed = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in tensors.items()
        }
        self.config, self.dtype, self.device = config, dtype, device
        self.feature_layers, self.vocab_size = config.feature_layers, config.vocab_size
        self.target_hidden_size = config.target_hidden_size
        self._embedding, self._tokens = placed[EMBEDDING], _tokens_of(placed["d2t"], config.vocab_size)
        self.fc = _linear(placed, "fc")
        self.qkv = _linear(placed, *(f"{LAYER}self_attn.{name}_proj" for name in "qkv"))
        self.output = _linear(placed, f"{LAYER}self_attn.o_proj")
        self.gate = Gate(_linear(placed, f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"), silu)
        self.down = _linear(placed, f"{LAYER}mlp.down_proj")
        self.head = _linear(placed, OUTPUT.removesuffix(".weight"))
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        weights = [*(placed[f"{LAYER}{name}.weight"] for name in names), placed["norm.weight"]]
        norms = [RowNorm(Norm(weight, config.rms_norm_eps)) for weight in weights]
        self._token_norm, self._feature_norm, self._mlp_norm, self._last_norm = norms
        self._angles = _angles(config, device)

    def fuse(self, features: Tensor) -> Tensor:
        """See Head."""
        fused: Tensor = self.fc(features.to(self.device, self.dtype))
        return fused

    def compute(self, rows: Rows, attend: Attend) -> tuple[Tensor, Tensor] | None:
        """See Head."""
        queries, entries, base = self.rows(rows.tokens, rows.features, rows.positions)
        mixed = attend(queries, entries, self.mix)
        return self.outputs(base[rows.asked], mixed) if rows.asked else None

    def rows(self, tokens: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [N] and positions [N] int64, features [N, C] -> queries [N, Q, D], keys and values [N, 2 H,
        D], and what the layer adds to [N, C]."""
        config = self.config
        normed = self._feature_norm(features)
        both = torch.cat((self._token_norm(embedding(tokens, self._embedding)), normed), -1)
        rotated = config.num_attention_heads + config.num_key_value_heads
        qkv = self.qkv(both).view(len(tokens), rotated + config.num_key_value_heads, -1)
        heads = qkv[:, :rotated]
        heads.copy_(rotate(heads, Rotations(positions, self._angles).complex))
        queries, entries = qkv.split((config.num_attention_heads, 2 * config.num_key_value_heads), 1)
        return queries, entries, normed if config.norm_before_residual else features

    def mix(self, queries: Tensor, entries: Tensor, seen: Tensor) -> Tensor:
        """Attention of queries [N, Q, D] over the entries [L, 2 H, D] that `seen` [N, L] allows -> [N, Q *
        D]."""
        keys, values = entries.transpose(0, 1).chunk(2)
        mixed = scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)

    def outputs(self, base: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """`base` [N, C], which the layer adds to, and `mixed` [N, Q * D] from attention -> features of the
        next rows [N, C], and float32 logits [N, V], minus infinity for tokens that the head does not
        propose."""
        hidden = base.clone()
        normed = self._mlp_norm(hidden, self.output(mixed.contiguous()))
        normed = self._last_norm(hidden, self.down(self.gate(normed)))
        logits = self.head(normed).float()
        if self._tokens is None:
            return hidden, logits
        spread = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return hidden, spread.index_copy_(1, self._tokens, logits)


def _linear(tensors: Mapping[str, Tensor], *names: str) -> nn.Linear:
    """Return one layer that computes the results of all named layers side by side."""
    weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    biased = f"{names[0]}.bias" in tensors
    return linear_of(weight, torch.cat([tensors[f"{name}.bias"] for name in names]) if biased else None)


def _tokens_of(d2t: Tensor, vocabulary: int) -> Tensor | None:
    """Return the target's token for each of the head's tokens; None when they are the same."""
    tokens = d2t + torch.arange(len(d2t), device=d2t.device)
    return None if len(d2t) == vocabulary and not d2t.any() else tokens


def _angles(config: HeadConfig, device: torch.device) -> Angles:
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        **config.rotary,
    )
    rotary = LlamaRotaryEmbedding(llama)
    return Angles(rotary.inv_freq.to(device), float(rotary.attention_scaling))
