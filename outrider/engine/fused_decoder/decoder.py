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

    (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Ba, Kiros and Hinton 2016, "Layer
    Normalization", whose rows are centred.)
    """

    weight: Tensor
    """[C], or [heads, C] for rows of heads; of the rows' dtype or float32."""
    eps: float
    centred: bool = False
    """The mean of a row is subtracted first."""
    bias: Tensor | None = None
    """[C], added last; of centred rows alone."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The factor of turned queries: 1 + rate ln(1 + floor(position / period)) (Ministral 3)."""

    rate: float
    period: int

    def factors(self, positions: Tensor) -> Tensor:
        """Of queries at positions [N]: [N, 1, 1] float32."""
        return (1 + self.rate * (positions // self.period).float().log1p())[:, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotary positions of some layers."""

    frequencies: Tensor
    """[R / 2] radians that a pair turns per position: of the first R columns of a head, of none if R is 0."""
    stretch: float
    """Factor of queries and keys that some kinds have."""
    growth: Growth | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How attention scores its keys, and which ones."""

    scaling: float
    """Factor of the scores."""
    window: int | None
    """Positions that attention reaches back, itself included."""
    softcap: float | None = None
    """Scores are bounded by it, with tanh (Gemma 2)."""
    sinks: Tensor | None = None
    """[Q] the score of a key without a value, for each query head (gpt-oss)."""

    @property
    def simple(self) -> bool:
        """Without softcap and sinks, which few kernels know."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class LayerSettings:
    """What a layer is besides its linear layers."""

    input_norm: Norm | None
    """None: attention reads its rows as they are (OLMo 2)."""
    mlp_norm: Norm | None
    """The same of the MLP."""
    output_norm: Norm | None
    """Over what attention gives, before it is added (Gemma 2 and 3)."""
    down_norm: Norm | None
    """The same for the MLP."""
    head_norm: Norm | None
    """Over each head of queries and keys."""
    whole_norms: tuple[Norm, Norm] | None
    """Over all heads of queries together, and over all of keys (OLMo 2)."""
    whole_means: Callable[[Tensor], Tensor] | None
    """Where other processes have the other heads: of the means of squares over those here, of queries and
    keys [N, 2], the means over all. None: all are here."""
    query_heads: int
    kv_heads: int
    head_dim: int
    rope: int
    """Which of the decoder's ropes turns queries and keys."""
    scores: Scores
    parallel: bool = False
    """The MLP reads what attention reads: the rows before attention's result is added to them."""
    added_factor: float = 1.0
    """Of what attention and MLP give, before it is added (Granite)."""


class Gate(nn.Module):
    """The gated half of an MLP: activation(gate) up, [..., C] -> [..., F].

    `gate_up` gives gate and up side by side, [..., 2 F], until one replaces it that opens the gate itself:
    whoever needs the two asks `opened` first.
    """

    def __init__(self, gate_up: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up = gate_up
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


class GatedMlp(nn.Module):
    """The gate, and the product behind it (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, gate: Gate, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.down = gate, down


class PlainMlp(nn.Module):
    """An MLP without a gate: a product, an activation, and the product behind it."""

    def __init__(self, up: nn.Module, activation: Callable[[Tensor], Tensor], down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.activation = activation


class Experts(nn.Module):
    """A mixture of experts, its router included, as transformers computes it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[M, C] -> [M, C]."""
        result = self.block(x[None])  # some give the router's scores as well
        mixed: Tensor = (result[0] if isinstance(result, tuple) else result)[0]
        return mixed


class FusedLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        index: int,
        settings: LayerSettings,
        *,
        qkv: nn.Module,
        output: nn.Module,
        mlp: GatedMlp | PlainMlp | Experts,
    ) -> None:
        """`qkv` is [(Q + 2 H) * D, C]."""
        super().__init__()
        self.index, self.settings = index, settings
        self.qkv: nn.Module = qkv
        self.mlp = mlp
        self.output: nn.Module = output


class FusedDecoder(nn.Module):
    """Embedding, layers, last norm and output layer; `kind` is the model's class in transformers.

    `positions`, if there is one, is the embedding of positions, added to that of tokens (GPT-2); `softcap`
    bounds the logits, with tanh (Gemma 2). Rows of the embedding and logits may have a factor (Granite).
    """

    def __init__(
        self,
        kind: str,
        *,
        embed: nn.Embedding,
        layers: list[FusedLayer],
        norm: Norm,
        head: nn.Module,
        ropes: list[Rope],
        softcap: float | None,
        positions: nn.Embedding | None = None,
        embedding_factor: float = 1.0,
        logit_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embedding_factor, self.logit_factor = embedding_factor, logit_factor
        self.norm = norm
        self.embed: nn.Module = embed
        self.positions = positions
        self.head = head
        self.layers = nn.ModuleList(layers)
        self.stack = layers
        self.ropes, self.softcap = ropes, softcap

    @property
    def gates(self) -> list[str]:
        """Names of the linear layers whose product may open its gate by SiLU."""
        return [
            f"layers.{layer.index}.mlp.gate.gate_up"
            for layer in self.stack
            if isinstance(layer.mlp, GatedMlp) and layer.mlp.gate.activation is silu
        ]
