"""What a GPU computes between the products of a fused decoder, by kernels: six launches per layer of a Llama.

    norm with the residual add (twice), rotation and storing, attention (two launches), activation

Shapes: N packed tokens, M rows (some of the N), C hidden width, Q query heads, H kv heads, D head width, F
width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from outrider.engine.fused_decoder.activation import NAMES, Activation
from outrider.engine.fused_decoder.decoder import (
    BoundedGate,
    Experts,
    FusedDecoder,
    FusedLayer,
    Gate,
    LayerSettings,
    Norm,
    PlainMlp,
    Router,
)
from outrider.engine.fused_decoder.forward import AddNorm, Choose, ExpertSum, Linear, Mix, Operations
from outrider.engine.fused_decoder.modules import NotFused
from outrider.engine.fused_decoder.norm import only_add
from outrider.engine.gpu.accelerator import overlapping
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.experts import bounded, choose, expert_sum
from outrider.engine.gpu.kernels.layers import activation_kernel, add_norm_kernel, rotation_kernel
from outrider.engine.gpu.layout import DeviceStep
from outrider.engine.gpu.mixed_attention import MixedKernelAttention
from outrider.engine.gpu.shapes import check_rows, check_shape

ACTIVATION_BLOCK = 1024
"""Columns of a row that one program activates."""


@dataclass(frozen=True, slots=True)
class RotatedStep:
    """A step, and for each rope the cosines and sines [N, R / 2] of its positions."""

    step: DeviceStep
    turns: list[tuple[Tensor, Tensor]]
    factors: list[Tensor | None]
    """For each rope the factors [N, 1, 1] of queries at these positions; None where all are 1."""


class GpuOperations(Operations[DeviceStep, RotatedStep]):
    """Operations by kernels, and by torch for activations that have no kernel."""

    def __init__(self, decoder: FusedDecoder, attention: KernelAttention | MixedKernelAttention) -> None:
        self._attention = attention
        self._ropes = decoder.ropes
        self._stretches = [None if rope.stretch == 1.0 else rope.stretches for rope in decoder.ropes]

    def begin(self, step: DeviceStep) -> RotatedStep:
        """The rotations of the step's positions."""
        positions = step.positions[0]
        angles = positions.float()[:, None]
        turns = [
            _turns(angles * rope.frequencies.float(), stretches)
            for rope, stretches in zip(self._ropes, self._stretches, strict=True)
        ]
        factors = [None if rope.growth is None else rope.growth.factors(positions) for rope in self._ropes]
        return RotatedStep(step, turns, factors)

    def norm(self, norm: Norm | None) -> AddNorm:
        """Return one launch for the norm and the residual add."""
        return only_add if norm is None else partial(_add_norm, norm)

    def mix(self, layer: FusedLayer) -> Mix[RotatedStep]:
        """Norms over all queries and all keys where the layer has them; other norms of heads, rotation and
        storing; then attention.

        Raises:
            NotFused: the layer has latents, for which there is no kernel.
        """
        if layer.settings.latent:
            raise NotFused("no kernel attends to latents")
        return partial(self._mix, layer.settings, *self._attention.place(layer.index))

    def gate(self, gate: Gate) -> Linear:
        """Return the product and a launch, unless torch has to activate or the product applies the gate
        itself."""
        if gate.opened or gate.activation not in NAMES:
            return super().gate(gate)
        gate_up: Any = gate.gate_up
        width, kind = gate_up.out_features // 2, NAMES[gate.activation]
        return lambda x: _activated(gate_up.forward(x), width, kind, gated=True)

    def activation(self, mlp: PlainMlp) -> Linear:
        """Return a launch, or torch's function."""
        called: Activation = mlp.activation
        if called not in NAMES:
            return called
        return lambda x: _activated(x, x.shape[1], NAMES[called], gated=False)

    def router(self, router: Router) -> Choose:
        """Return the product for the scores, and a launch."""
        return partial(choose, router)

    def experts(self, experts: Experts) -> ExpertSum:
        """Return five launches, unless torch has to activate."""
        gate, activation = experts.gate, experts.activation
        if isinstance(gate, BoundedGate):
            gate = partial(bounded, gate)
        elif activation is not None and activation in NAMES:
            width = experts.down.weight.shape[2]
            gate = partial(_activated, width=width, kind=NAMES[activation], gated=True)
        return partial(expert_sum, experts, gate)

    @staticmethod
    def _mix(
        settings: LayerSettings, attention: KernelAttention, place: int, qkv: Tensor, rotated: RotatedStep
    ) -> Tensor:
        """Return attention's output [N, Q * D] for qkv [N, Q + 2 H, D]."""
        _norm_together(settings, qkv)
        _rotate(settings, (attention.keys[place], attention.values[place]), qkv, rotated)
        if (factors := rotated.factors[settings.rope]) is not None:
            qkv[:, : settings.query_heads].mul_(factors)
        queries = qkv[:, : settings.query_heads]
        return attention.mix(place, queries, settings.scores).flatten(1)


def _rotate(
    settings: LayerSettings, memory: tuple[Tensor, Tensor], qkv: Tensor, rotated: RotatedStep
) -> None:
    """Rotate queries and keys of qkv [N, Q + 2 H, D], and store keys and values in `memory`, each [S, H, D].

    H is 0, and nothing is stored, where a layer sees the memory of an earlier one.
    """
    norm, value_norm = settings.head_norm, settings.value_norm
    cos, sin = rotated.turns[settings.rope]
    half, width = cos.shape[1], settings.head_dim
    check_shape("qkv", qkv, len(cos), settings.query_heads + 2 * settings.kv_heads, width)
    rotation_kernel[qkv.shape[:2]](
        qkv,
        *memory,
        cos,
        sin,
        qkv if norm is None else norm.weight,
        qkv if value_norm is None else value_norm.weight,
        rotated.step.buffer,
        rotated.step.layout.at("slots"),
        0.0 if norm is None else norm.eps,
        0.0 if value_norm is None else value_norm.eps,
        QUERY_HEADS=settings.query_heads,
        KV_HEADS=settings.kv_heads,
        WIDTH=width,
        HALF=half,
        BLOCK=next_power_of_2(width),
        BLOCK_HALF=next_power_of_2(max(half, 1)),
        NORM=norm is not None,
        VALUE_NORM=value_norm is not None,
        num_warps=1,
        **overlapping(qkv.device),
    )


def _turns(angles: Tensor, stretches: Tensor | None) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if stretches is None else (cos * stretches, sin * stretches)


def _add_norm(norm: Norm, hidden: Tensor, added: Tensor | None) -> Tensor:
    """Return the norm of hidden rows [M, C], to which `added` is first added."""
    check_shape("hidden", hidden, len(hidden), len(norm.weight))
    if added is not None:
        check_shape("what is added", added, *hidden.shape)
    out = torch.empty_like(hidden)
    _launch_norm(norm, hidden, added, out)
    return out


def _norm_together(settings: LayerSettings, qkv: Tensor) -> None:
    """Normalise all queries of a token together, and all its keys, in qkv [N, Q + 2 H, D]."""
    queries, keys = settings.query_heads, settings.kv_heads
    for norm, start, heads in zip(settings.whole_norms or (), (0, queries), (queries, keys), strict=False):
        rows = qkv[:, start : start + heads].flatten(1)
        check_rows("queries or keys", rows, len(qkv), len(norm.weight))
        _launch_norm(norm, rows, None, rows)


def _launch_norm(norm: Norm, hidden: Tensor, added: Tensor | None, out: Tensor) -> None:
    """Launch the kernel. Rows [M, C] of `hidden` and `out` have equal strides; those of `added` follow each
    other."""
    width = hidden.shape[1]
    add_norm_kernel[(len(hidden),)](
        hidden,
        hidden if added is None else added,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        out,
        hidden.stride(0),
        norm.eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        ADD=added is not None,
        CENTRED=norm.centred,
        BIAS=norm.bias is not None,
        num_warps=8,
        **overlapping(hidden.device),
    )


def _activated(x: Tensor, width: int, kind: str, *, gated: bool) -> Tensor:
    """Return the activation of x [M, F], in place, or with a gate that of [M, 2 F]; `width` is F."""
    check_shape("what is activated", x, len(x), 2 * width if gated else width)
    out = x.new_empty((len(x), width)) if gated else x
    activation_kernel[(len(x), -(-width // ACTIVATION_BLOCK))](
        x,
        out,
        WIDTH=width,
        BLOCK=ACTIVATION_BLOCK,
        KIND=kind,
        GATED=gated,
        **overlapping(x.device),
    )
    return out
