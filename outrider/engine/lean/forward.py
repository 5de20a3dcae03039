"""The forward of pre-norm decoder layers with RMS norms, rotary positions, grouped queries and a gated MLP.

    mix         one product for queries, keys and values, rotation, attention over pages
    transform   output product, norm, one product for gate and up, down product, the next layer's norm

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
from outrider.engine.kernels.layer import Angles
from outrider.engine.lean.attention import LeanAttention
from outrider.engine.lean.decoder import LeanDecoder, LeanLayer, RmsNorm
from outrider.engine.lean.rotation import Turns, make_rotation
from outrider.engine.packed_linear import StreamedGate, StreamedLinear

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
        self._head = decoder.head.forward
        norms = [*(layer.settings.input_norm for layer in decoder.stack[1:]), decoder.norm]
        self._first_norm = decoder.stack[0].settings.input_norm
        self._layers = [_Layer(layer, norm) for layer, norm in zip(decoder.stack, norms, strict=True)]
        self._angles = Angles(decoder.frequencies, decoder.stretch)

    def __call__(self, step: Step, attention: Attention) -> Tensor:
        """Logits [W, V] of the step's wanted tokens."""
        hidden = embedding(step.tokens[0], self._embed)
        turns = Turns(step.positions[0], self._angles)
        last = self._layers[-1]
        normed = self._first_norm(hidden)
        for layer in self._layers:
            mixed = layer.mix(normed, turns, attention)
            if layer is last:  # what follows is needed for the wanted rows only
                hidden, mixed = hidden.index_select(0, step.wanted), mixed.index_select(0, step.wanted)
            normed = layer.transform(hidden, mixed)
        logits: Tensor = self._head(normed)
        return logits


class _Layer:
    """One layer's functions by name: looking them up in modules takes as long as calling them."""

    def __init__(self, layer: LeanLayer, next_norm: RmsNorm) -> None:
        settings = layer.settings
        self._layer, self._index, self._settings = layer, layer.layer_idx, settings
        self._qkv, self._output = layer.qkv.forward, layer.output.forward
        self._gate_up, self._down = layer.gate_up.forward, layer.down.forward
        self._mlp_norm, self._next_norm = settings.mlp_norm, next_norm
        self._activation = settings.activation
        self._opens = isinstance(layer.gate_up, StreamedGate)
        self._crew = layer.down.crew if isinstance(layer.down, StreamedLinear) else Crew()
        self._heads = settings.query_heads + 2 * settings.kv_heads
        self._turned = settings.query_heads + settings.kv_heads
        self._rotate = make_rotation(settings, settings.input_norm.weight)

    def mix(self, normed: Tensor, turns: Turns, attention: Attention) -> Tensor:
        """Attention's output [N, Q * D] for normed [N, C]."""
        rows = normed.shape[0]
        qkv: Tensor = self._qkv(normed).view(rows, self._heads, -1)
        if isinstance(attention, LeanAttention):
            self._rotate(qkv, turns, attention.room(self._index))
            return attention.mix(self._index, qkv, self._settings.scaling, self._settings.window)
        self._rotate(qkv, turns, None)
        return self._attend(qkv, attention).view(rows, -1)

    def transform(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Add the layer's result to hidden [M, C] and return the next norm of it; mixed [M, Q * D]."""
        normed = self._mlp_norm.after(hidden, self._output(mixed))
        return self._next_norm.after(hidden, self._down(self._gated(normed)))

    def _gated(self, normed: Tensor) -> Tensor:
        """The opened gate [M, F] of normed [M, C]; the crew shares the rows of a long step."""
        if self._opens:
            opened: Tensor = self._gate_up(normed)
            return opened
        gate, up = self._gate_up(normed).chunk(2, -1)
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
