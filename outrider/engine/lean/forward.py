"""The forward of pre-norm decoder layers with RMS norms, rotary positions, grouped queries and a gated MLP.

    mix         norm, one product for queries, keys and values, rotation, attention over pages
    transform   output product, norm, one product for gate and up, down product

Llama, Mistral, Qwen 2 and 3, Phi 3 and their like. It computes what the model's own modules compute with a
third of the operations: at decoding sizes an operation costs more than its arithmetic. The self check at
load compares the two.

Nothing in a forward depends on values in tensors, so it can be captured in a CUDA graph.

Shapes: N packed tokens, M of them or the W wanted ones, C hidden width, Q query heads, H kv heads, D head
width, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from outrider.engine.kernels.crew import Crew
from outrider.engine.lean.attention import LeanAttention
from outrider.engine.lean.decoder import LeanDecoder, LeanLayer
from outrider.engine.packed_linear import StreamedLinear

ROWS_PER_PART = 16
"""Rows of an activation that one of the crew computes at a time."""


class Step(Protocol):
    """What a forward needs of `outrider.engine.step.Step`."""

    @property
    def tokens(self) -> Tensor:
        """[1, N] int64."""

    @property
    def positions(self) -> Tensor:
        """[1, N] int64."""

    @property
    def wanted(self) -> Tensor:
        """[W] int64, packed positions whose logits are wanted."""


class Attention(Protocol):
    """What a forward needs of `outrider.engine.attention.PagedAttention`."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
    ) -> tuple[Tensor, None]:
        """Query [1, Q, N, D], key and value [1, H, N, D] -> [1, N, Q, D]."""


class LeanForward:
    """Runs a lean model with the linear layers that it has now, so make it after they were packed."""

    def __init__(self, decoder: LeanDecoder) -> None:
        self._embed = decoder.embed.weight
        self._norm, self._head = decoder.norm, decoder.head.forward
        self._layers = [_Layer(layer) for layer in decoder.stack]
        self._frequencies = decoder.frequencies.float()
        self._stretch = torch.full_like(self._frequencies, decoder.stretch)

    def __call__(self, step: Step, attention: Attention) -> Tensor:
        """Logits [W, V] of the step's wanted tokens."""
        hidden = embedding(step.tokens[0], self._embed)
        turns = self._turns(step.positions[0])
        last = self._layers[-1]
        for layer in self._layers:
            mixed = layer.mix(hidden, turns, attention)
            if layer is last:  # what follows is needed for the wanted rows only
                hidden, mixed = hidden.index_select(0, step.wanted), mixed.index_select(0, step.wanted)
            layer.transform(hidden, mixed)
        logits: Tensor = self._head(self._norm(hidden))
        return logits

    def _turns(self, positions: Tensor) -> Tensor:
        """Complex rotations [N, 1, D / 2] of positions [N]."""
        angles = positions.float()[:, None] * self._frequencies
        return torch.polar(self._stretch.expand_as(angles), angles)[:, None]


class _Layer:
    """One layer's functions by name: looking them up in modules takes as long as calling them."""

    def __init__(self, layer: LeanLayer) -> None:
        settings = layer.settings
        self._layer, self._settings = layer, settings
        self._qkv, self._output = layer.qkv.forward, layer.output.forward
        self._gate_up, self._down = layer.gate_up.forward, layer.down.forward
        self._input_norm, self._mlp_norm = settings.input_norm, settings.mlp_norm
        self._head_norm, self._activation = settings.head_norm, settings.activation
        self._crew = layer.down.crew if isinstance(layer.down, StreamedLinear) else Crew()
        self._heads = settings.query_heads + 2 * settings.kv_heads
        self._turned = settings.query_heads + settings.kv_heads

    def mix(self, hidden: Tensor, turns: Tensor, attention: Attention) -> Tensor:
        """Attention's output [N, Q * D] for hidden [N, C] and complex rotations [N, 1, D / 2]."""
        rows = hidden.shape[0]
        qkv: Tensor = self._qkv(self._input_norm(hidden)).view(rows, self._heads, -1)
        turned = qkv[:, : self._turned]
        turned.copy_(rotate(turned if self._head_norm is None else self._head_norm(turned), turns))
        if isinstance(attention, LeanAttention):
            return attention.mix(self._layer, qkv, self._settings.scaling, self._settings.window)
        return self._attend(qkv, attention).view(rows, -1)

    def transform(self, hidden: Tensor, mixed: Tensor) -> None:
        """Add the layer's result to hidden [M, C]; mixed [M, Q * D]."""
        hidden.add_(self._output(mixed))
        hidden.add_(self._down(self._gated(self._gate_up(self._mlp_norm(hidden)))))

    def _gated(self, gate_up: Tensor) -> Tensor:
        """[M, 2 F] -> [M, F]; the crew shares the rows of a long step."""
        gate, up = gate_up.chunk(2, -1)
        rows = gate.shape[0]
        size = self._crew.size(rows)
        if size == 1 or rows <= ROWS_PER_PART:
            return self._activation(gate).mul_(up)
        result = torch.empty_like(gate, memory_format=torch.contiguous_format)

        @torch.inference_mode()
        def work(_: int, start: int) -> None:
            part = slice(start, start + ROWS_PER_PART)
            torch.mul(self._activation(gate[part]), up[part], out=result[part])

        self._crew.share(size, range(0, rows, ROWS_PER_PART), work)
        return result

    def _attend(self, qkv: Tensor, attention: Attention) -> Tensor:
        """The same by the attention of all models: qkv [N, Q + 2 H, D] -> [1, N, Q, D]."""
        heads = qkv.transpose(0, 1).unsqueeze(0)
        mixed, _ = attention.attend(
            self._layer,
            heads[:, : self._settings.query_heads],
            heads[:, self._settings.query_heads : self._turned],
            heads[:, self._turned :],
            None,
            scaling=self._settings.scaling,
            sliding_window=self._settings.window,
        )
        return mixed


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate each head by its position: x [N, heads, D], complex turns [N, 1, D / 2]; float32.

    Columns i and i + D / 2 form a pair, as in transformers; here they end up side by side. That changes no
    score, because queries and keys are laid out alike. (Su et al. 2021, "RoFormer".)
    """
    half = x.shape[-1] // 2
    exact = x.float()
    pairs = torch.complex(exact[..., :half], exact[..., half:])
    return torch.view_as_real(pairs.mul_(turns)).flatten(-2)
