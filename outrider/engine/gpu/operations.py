"""What a GPU computes between the products of a fused decoder, by kernels: six launches per layer.

    norm with the residual add (twice), rotation and storing, attention (two launches), gate

Shapes: N packed tokens, M of them, C hidden width, Q query heads, H kv heads, D head width, F width of the
MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from outrider.engine.fused_decoder import NotFused
from outrider.engine.fused_decoder.decoder import FusedDecoder, FusedLayer, Gate, Norm, PlainMlp
from outrider.engine.fused_decoder.forward import AddNorm, Linear, Mix
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.kernels.layers import add_norm_kernel, gate_kernel, rotation_kernel
from outrider.engine.gpu.layout import DeviceStep
from outrider.engine.gpu.shapes import check_shape

GATE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RotatedStep:
    """A step, and for each rope the cosines and sines [N, D / 2] of its positions."""

    step: DeviceStep
    turns: list[tuple[Tensor, Tensor]]


class GpuOperations:
    """See `outrider.engine.fused_decoder.forward.Operations`.

    Raises:
        NotFused: the decoder has parts that the kernels do not compute.
    """

    def __init__(self, decoder: FusedDecoder, attention: KernelAttention) -> None:
        if (part := decoder.beyond_llama()) is not None:
            raise NotFused(f"it has {part}, which the kernels of GPUs do not compute")
        self._attention = attention
        self._ropes = [(rope.frequencies.float(), rope.stretch) for rope in decoder.ropes]

    def begin(self, step: DeviceStep) -> RotatedStep:
        """The rotations of the step's positions."""
        positions = step.positions[0].float()[:, None]
        return RotatedStep(step, [_turns(positions * rope, stretch) for rope, stretch in self._ropes])

    def norm(self, norm: Norm | None) -> AddNorm:
        """One launch, the residual add included."""
        assert norm is not None, "the decoder was refused"
        return partial(_add_norm, norm)

    def mix(self, layer: FusedLayer) -> Mix[RotatedStep]:
        """Rotation and storing, then attention."""
        return partial(self._mix, layer)

    def gate(self, gate: Gate) -> Linear:
        """The product and a launch, where neither torch has to activate nor the product opens the gate."""
        called: Linear = gate.forward
        if gate.opened or gate.activation is not silu:
            return called
        gate_up: Any = gate.gate_up
        return partial(_gate, gate_up.forward, gate_up.out_features // 2)

    def activation(self, mlp: PlainMlp) -> Linear:
        """Of no decoder that runs here: `beyond_llama` keeps them out."""
        raise NotImplementedError("MLPs without a gate have no kernel; such models run their own modules")

    def _mix(self, layer: FusedLayer, qkv: Tensor, rotated: RotatedStep) -> Tensor:
        """Attention's output [N, Q * D] for qkv [N, Q + 2 H, D]."""
        settings, attention = layer.settings, self._attention
        queries, norm, scores = settings.query_heads, settings.head_norm, settings.scores
        cos, sin = rotated.turns[settings.rope]
        half = cos.shape[1]
        check_shape("qkv", qkv, len(cos), queries + 2 * settings.kv_heads, 2 * half)
        rotation_kernel[qkv.shape[:2]](
            qkv,
            attention.keys[layer.index],
            attention.values[layer.index],
            cos,
            sin,
            qkv if norm is None else norm.weight,
            rotated.step.buffer,
            rotated.step.layout.at("slots"),
            0.0 if norm is None else norm.eps,
            QUERY_HEADS=queries,
            KV_HEADS=settings.kv_heads,
            HALF=half,
            BLOCK=_power_of_2(half),
            NORM=norm is not None,
            num_warps=1,
        )
        attention.note(layer.index, scores.window, {})
        mixed = attention.mix(
            rotated.step,
            layer.index,
            qkv[:, :queries],
            scaling=scores.scaling,
            window=scores.window,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )
        return mixed.flatten(1)


def _turns(angles: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if stretch == 1.0 else (cos * stretch, sin * stretch)


def _add_norm(norm: Norm, hidden: Tensor, added: Tensor | None) -> Tensor:
    """Normed hidden rows [M, C], which first get `added`."""
    rows, width = hidden.shape
    check_shape("hidden", hidden, rows, len(norm.weight))
    if added is not None:
        check_shape("what is added", added, rows, width)
    out = torch.empty_like(hidden)
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


def _gate(gate_up: Linear, width: int, normed: Tensor) -> Tensor:
    """SiLU(gate) up [M, F] of what the product gives for normed [M, C]; `width` is F."""
    both = gate_up(normed)
    check_shape("gate and up", both, len(normed), 2 * width)
    opened = both.new_empty((len(both), width))
    gate_kernel[(len(both), -(-width // GATE_BLOCK))](both, opened, WIDTH=width, BLOCK=GATE_BLOCK)
    return opened


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
