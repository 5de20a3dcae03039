"""The one description of the decoders that run fused: weights, fused where one product does for several.

`outrider.engine.fused_decoder.recognise` makes it from a transformers model, `forward` computes with it.

Shapes: C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import silu


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Scales rows to a root mean square of 1, in float32, then each column by its weight.

    (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".)
    """

    weight: Tensor
    """[C], or [heads, C] for rows of heads."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerSettings:
    """What a layer is besides its linear layers."""

    input_norm: Norm
    mlp_norm: Norm
    head_norm: Norm | None
    """Over each head of queries and keys."""
    query_heads: int
    kv_heads: int
    scaling: float
    """Factor of the scores."""
    window: int | None
    """Positions that attention reaches back, itself included."""


class Gate(nn.Module):
    """The gated half of an MLP: activation(gate) up, [..., C] -> [..., F].

    `gate_up` gives gate and up side by side, [..., 2 F], until one replaces it that opens the gate itself:
    whoever needs the two asks `opened` first.
    """

    def __init__(self, gate_up: nn.Linear, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up: nn.Module = gate_up
        self.activation = activation

    @property
    def opened(self) -> bool:
        """True when the product is SiLU(gate) up already."""
        return getattr(self.gate_up, "gated", False) is True

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., F]."""
        result: Tensor = self.gate_up(x)
        if self.opened:
            return result
        gate, up = result.chunk(2, -1)
        return self.activation(gate).mul_(up)


class FusedLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        index: int,
        settings: LayerSettings,
        *,
        qkv: nn.Linear,
        output: nn.Linear,
        gate: Gate,
        down: nn.Linear,
    ) -> None:
        """`qkv` is [(Q + 2 H) * D, C]."""
        super().__init__()
        self.index, self.settings = index, settings
        self.qkv, self.output, self.gate, self.down = qkv, output, gate, down


class FusedDecoder(nn.Module):
    """Embedding, layers, last norm and output layer; `kind` is the model's class in transformers.

    `frequencies` [D / 2] are the radians that a pair turns per position, `stretch` the factor of queries
    and keys that some rope kinds have.
    """

    def __init__(
        self,
        kind: str,
        *,
        embed: nn.Embedding,
        layers: list[FusedLayer],
        norm: Norm,
        head: nn.Linear,
        frequencies: Tensor,
        stretch: float,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.norm, self.head = embed, norm, head
        self.layers = nn.ModuleList(layers)
        self.stack = layers
        self.frequencies, self.stretch = frequencies, stretch

    @property
    def gates(self) -> list[str]:
        """Names of the linear layers whose product may open its gate by SiLU."""
        return [f"layers.{layer.index}.gate.gate_up" for layer in self.stack if layer.gate.activation is silu]
