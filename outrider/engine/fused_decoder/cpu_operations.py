"""What is computed between the products of a fused decoder, on the CPU and on GPUs without Triton."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from outrider.engine.attention import PagedAttention
from outrider.engine.cpu.layer import Angles, BoundKernel, runs
from outrider.engine.cpu.recording import several_with_break
from outrider.engine.fused_decoder.activation import make_activation, make_gate
from outrider.engine.fused_decoder.decoder import FusedDecoder, FusedLayer, Gate, Norm, PlainMlp, Router
from outrider.engine.fused_decoder.forward import AddNorm, Choose, Inputs, Linear, Mix, Operations
from outrider.engine.fused_decoder.norm import RowNorm, only_add
from outrider.engine.fused_decoder.rotation import Rotations, after_norms, after_value_norm, make_rotation
from outrider.engine.mixed_attention import MixedAttention


class CpuOperations(Operations[Inputs, list[Rotations]]):
    """Operations by CPU kernels where they run, otherwise by torch."""

    def __init__(self, decoder: FusedDecoder, attention: PagedAttention | MixedAttention) -> None:
        self._attention = attention
        self._angles = [(Angles(rope.frequencies, rope.stretches), rope.growth) for rope in decoder.ropes]

    def begin(self, step: Inputs) -> list[Rotations]:
        """The rotations of the step's positions, for each rope."""
        return [Rotations(step.positions[0], angles, growth) for angles, growth in self._angles]

    def norm(self, norm: Norm | None) -> AddNorm:
        """A kernel or torch."""
        return only_add if norm is None else RowNorm(norm, self._attention.dtype)

    def mix(self, layer: FusedLayer) -> Mix[list[Rotations]]:
        """Rotation and storing, then attention."""
        settings, (attention, index) = layer.settings, self._attention.place(layer.index)
        rotate = make_rotation(settings, attention.dtype, attention.device)
        rope, scores = settings.rope, settings.scores
        if scores.sinks is not None:  # as the kernel reads them: a recorded forward may not convert them
            scores = replace(scores, sinks=scores.sinks.float().contiguous())
        if settings.whole_norms is not None:
            rotate = after_norms(settings, attention.dtype, rotate)

        if settings.value_norm is not None:
            rotate = after_value_norm(settings, attention.dtype, rotate)

        def mix(qkv: Tensor, rotations: list[Rotations]) -> Tensor:
            rotate(qkv, rotations[rope], attention.room(index))
            if (factors := rotations[rope].factors) is not None:
                qkv[:, : settings.query_heads].mul_(factors)
            return attention.mix(index, qkv[:, : settings.query_heads], scores).flatten(1)

        return mix

    def bound(self, softcap: float) -> Linear:
        """A kernel or torch."""
        runs_here = runs(self._attention.dtype, self._attention.device)
        return BoundKernel(self._attention.dtype, softcap) if runs_here else super().bound(softcap)

    def router(self, router: Router) -> Choose:
        """The scores as of a linear layer; torch chooses."""
        scores, choose = router.scores.forward, several_with_break(router.choose)

        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            chosen, shares = choose(scores(x))
            return chosen, shares

        return call

    def gate(self, gate: Gate) -> Linear:
        """A kernel or torch."""
        return make_gate(gate, self._attention.dtype, self._attention.device)

    def activation(self, mlp: PlainMlp) -> Linear:
        """A kernel or torch."""
        return make_activation(mlp.activation, self._attention.dtype, self._attention.device)
