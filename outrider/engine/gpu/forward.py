"""The forward of a lean model with kernels: per layer four products and six launches.

    norm, product for queries, keys and values, rotation and storing, attention (two launches),
    output product, norm with the residual add, product for gate and up, gate, down product

It computes what `outrider.engine.lean.forward` computes; the self check at load compares it with the model.

Shapes: N packed tokens, W wanted rows, C hidden width, Q query heads, H kv heads, D head width, F width of
the MLP, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.kernels.layers import add_norm_kernel, gate_kernel, turn_kernel
from outrider.engine.gpu.layout import DeviceStep
from outrider.engine.lean import LeanDecoder
from outrider.engine.lean.decoder import LeanLayer, RmsNorm

GATE_BLOCK = 1024


class KernelForward:
    """Runs a lean model on `attention`'s keys and values."""

    def __init__(self, decoder: LeanDecoder, attention: KernelAttention) -> None:
        self._decoder = decoder
        self._attention = attention
        self._frequencies = decoder.frequencies.float()

    def __call__(self, step: DeviceStep) -> Tensor:
        """Logits [W, V] of the step's wanted tokens."""
        decoder = self._decoder
        hidden = embedding(step.tokens[0], decoder.embed.weight)
        cos, sin = self._turns(step.positions[0])
        added: Tensor | None = None
        for layer in decoder.stack:
            mixed = self._mix(layer, step, _add_norm(hidden, added, layer.settings.input_norm), cos, sin)
            if layer is decoder.stack[-1]:  # what follows is needed for the wanted rows only
                if added is not None:
                    hidden, added = hidden.index_select(0, step.wanted), added.index_select(0, step.wanted)
                mixed = mixed.index_select(0, step.wanted)
            added = self._transform(layer, hidden, mixed)
        assert added is not None, "a model has layers"
        logits: Tensor = decoder.head(_add_norm(hidden, added, decoder.norm))
        return logits

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, D / 2] of positions [N]."""
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos() * self._decoder.stretch, angles.sin() * self._decoder.stretch

    def _mix(self, layer: LeanLayer, step: DeviceStep, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention's output [N, Q * D] for normed [N, C]."""
        settings, attention = layer.settings, self._attention
        queries, kv_heads = settings.query_heads, settings.kv_heads
        qkv = layer.qkv(normed).view(len(normed), queries + 2 * kv_heads, -1)
        half, norm = qkv.shape[-1] // 2, settings.head_norm
        turn_kernel[(len(qkv), qkv.shape[1])](
            qkv,
            attention.keys[layer.layer_idx],
            attention.values[layer.layer_idx],
            cos,
            sin,
            qkv if norm is None else norm.weight,
            step.buffer,
            step.layout.at("slots"),
            0.0 if norm is None else norm.eps,
            QUERY_HEADS=queries,
            KV_HEADS=kv_heads,
            HALF=half,
            BLOCK=_power_of_2(half),
            NORM=norm is not None,
            num_warps=1,
        )
        attention.note(layer.layer_idx, settings.window, {})
        mixed = attention.mix(
            step, layer.layer_idx, qkv[:, :queries], scaling=settings.scaling, window=settings.window
        )
        return mixed.flatten(1)

    def _transform(self, layer: LeanLayer, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What the MLP adds [M, C]; hidden [M, C] gets what attention adds."""
        normed = _add_norm(hidden, layer.output(mixed), layer.settings.mlp_norm)
        gate_up = layer.gate_up(normed)  # [M, 2 F]
        if layer.settings.activation is not silu:
            gate, up = gate_up.chunk(2, -1)
            return _down(layer, layer.settings.activation(gate) * up)
        width = gate_up.shape[1] // 2
        opened = gate_up.new_empty((len(gate_up), width))
        gate_kernel[(len(gate_up), -(-width // GATE_BLOCK))](gate_up, opened, WIDTH=width, BLOCK=GATE_BLOCK)
        return _down(layer, opened)


def _down(layer: LeanLayer, opened: Tensor) -> Tensor:
    added: Tensor = layer.down(opened)
    return added


def _add_norm(hidden: Tensor, added: Tensor | None, norm: RmsNorm) -> Tensor:
    """Normed hidden rows [N, C], which first get `added`."""
    out = torch.empty_like(hidden)
    width = hidden.shape[1]
    add_norm_kernel[(len(hidden),)](
        hidden,
        hidden if added is None else added,
        norm.weight,
        out,
        norm.eps,
        WIDTH=width,
        BLOCK=_power_of_2(width),
        ADD=added is not None,
        num_warps=8,
    )
    return out


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
