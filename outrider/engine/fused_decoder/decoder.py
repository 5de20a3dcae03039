"""The one description of the decoders that run fused: weights, fused where one product replaces several.

`outrider.engine.fused_decoder.recognise` makes it from a transformers model, `forward` computes with it.

Shapes: C hidden width, Q query heads, H kv heads, D head width, F width of the MLP, V vocabulary,
E experts, of which a token goes through K; L layers, P numbers per token in a layer's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.engine.loaded_model import Geometry


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
    """True where the mean of a row is subtracted first."""
    bias: Tensor | None = None
    """[C], added last; only for centred rows."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The factor of rotated queries: 1 + rate ln(1 + floor(position / period)) (Ministral 3)."""

    rate: float
    period: int

    def factors(self, positions: Tensor) -> Tensor:
        """Return the factors [N, 1, 1] float32 of queries at positions [N]."""
        return (1 + self.rate * (positions // self.period).float().log1p())[:, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotary positions of some layers."""

    frequencies: Tensor
    """[R / 2] radians by which each pair of columns is rotated per position. The first R columns of a head
    are rotated, none if R is 0."""
    stretch: float
    """Factor of rotated columns of queries and keys; not 1 in some kinds of ropes."""
    growth: Growth | None = None
    still: int = 0
    """Number of the last pairs that are not rotated, and have an angle of 0."""

    @property
    def stretches(self) -> Tensor:
        """The factors [R / 2] float32 of the pairs."""
        found = torch.full_like(self.frequencies, self.stretch, dtype=torch.float32)
        found[len(found) - self.still :] = 1.0
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How attention scores its keys, and which keys it scores."""

    scaling: float
    """Factor of the scores."""
    window: int | None
    """Positions that attention reaches back, the token's own included; None: no limit."""
    softcap: float | None = None
    """The bound of scores, by tanh (Gemma 2)."""
    sinks: Tensor | None = None
    """[Q] for each query head, the score of a key that has no value (gpt-oss)."""

    @property
    def simple(self) -> bool:
        """True without softcap and sinks, which few kernels support."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True, eq=False)
class LayerSettings:
    """Everything about a decoder layer except its linear layers."""

    input_norm: Norm | None
    """The norm before attention. None: attention reads its rows as they are (OLMo 2)."""
    mlp_norm: Norm | None
    """The norm before the MLP; None: the MLP reads its rows as they are."""
    output_norm: Norm | None
    """The norm of attention's result before it is added (Gemma 2 and 3)."""
    down_norm: Norm | None
    """The norm of the MLP's result before it is added."""
    head_norm: Norm | None
    """The norm over each head of queries and keys."""
    whole_norms: tuple[Norm, Norm] | None
    """The norms over all heads of queries together, and over all heads of keys (OLMo 2)."""
    value_norm: Norm | None
    """The norm over each head of values (Gemma 4)."""
    whole_means: Callable[[Tensor], Tensor] | None
    """Where other processes have the other heads, turns the means of squares over the heads here, of queries
    and keys [N, 2], into the means over all heads. None: all heads are here."""
    query_heads: int
    kv_heads: int
    """The layer's own kv heads; 0: attention sees the keys and values of an earlier layer (Gemma 4)."""
    head_dim: int
    rope: int
    """The index of the decoder's rope that rotates queries and keys."""
    scores: Scores
    parallel: bool = False
    """True where the MLP reads what attention reads: the rows before attention's result is added to them."""
    added_factor: float = 1.0
    """Factor of the results of attention and MLP, before they are added (Granite)."""
    inputs_norm: Norm | None = None
    """The norm of the result of the layer's own inputs, before it is added."""
    factor: float = 1.0
    """Factor of the layer's result rows (Gemma 4)."""
    latent: bool = False
    """Whether values are the last columns of keys (DeepSeek)."""

    @property
    def stored(self) -> int:
        """Heads that are stored for a token."""
        return self.kv_heads * (1 if self.latent else 2)


class Gate(nn.Module):
    """The gated half of an MLP: activation(gate) up, [..., C] -> [..., F].

    `gate_up` returns gate and up side by side, [..., 2 F], until a layer replaces it that applies the gate
    itself. Who needs gate and up has to check `opened` first.
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
    """The gate, and the product after it (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, gate: Gate, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.down = gate, down


class PlainMlp(nn.Module):
    """An MLP without a gate: a product, an activation, and another product."""

    def __init__(self, up: nn.Module, activation: Callable[[Tensor], Tensor], down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down
        self.activation = activation


class Router(nn.Module):
    """Chooses the experts of a token: those with the highest scores. Their shares are a softmax of scores."""

    def __init__(self, scores: nn.Module, count: int, *, normalised: bool) -> None:
        """`scores` computes the scores of E experts; the shares of the `count` chosen ones add up to 1 if
        `normalised`."""
        super().__init__()
        self.scores, self.count, self.normalised = scores, count, normalised

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[M, C] -> the chosen experts [M, K] int64, and their shares [M, K] float32."""
        return self.choose(self.scores(x))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scores [M, E] -> what `forward` returns."""
        scores = scores.float()
        if self.normalised:
            best, chosen = scores.topk(self.count)
            return chosen, best.softmax(-1)
        shares, chosen = scores.softmax(-1).topk(self.count)
        return chosen, shares


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLinears:
    """One linear layer of each of E experts."""

    weight: Tensor
    """[E, out, in], whatever the order of its strides."""
    bias: Tensor | None
    """[E, out]."""


@dataclass(frozen=True, slots=True)
class BoundedGate:
    """The gate of gpt-oss, gate sigmoid(alpha gate) (up + 1), where gate and up are bounded and alternate by
    column."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """[S, 2 F] -> [S, F]."""
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid_() * (up + 1)


class Experts(nn.Module):
    """A mixture of experts: gated MLPs of which each token goes through K.

    (Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer".)
    """

    def __init__(
        self,
        router: Router,
        own: nn.Module,
        *,
        gate_up: ExpertLinears,
        down: ExpertLinears,
        activation: Callable[[Tensor], Tensor] | None,
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        """`own` is transformers' module with these weights, which computes [M, C] from x [M, C], experts and
        shares. `gate` turns the result [S, 2 F] of `gate_up` into [S, F]: `activation` of the first half
        times the second, or something else where `activation` is None.
        """
        super().__init__()
        self.router, self.own = router, own
        self.gate_up, self.down = gate_up, down
        self.activation, self.gate = activation, gate
        self.together: Callable[[Tensor], Tensor] | None = None
        """Where other processes have the other columns, turns the sum over the columns here, [M, C], into the
        sum over all."""


class ForeignMlp(nn.Module):
    """An MLP that transformers' own module computes: experts of other kinds."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[M, C] -> [M, C]."""
        result = self.block(x[None])  # some return the router's scores as well
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
        mlp: GatedMlp | PlainMlp | Experts | ForeignMlp,
        inputs: PlainMlp | None,
    ) -> None:
        """`qkv` is [(Q + 2 H) * D, C], or [(Q + H) * D, C] with latents. `inputs` runs after the MLP: its P
        activated columns are multiplied by the layer's own inputs.
        """
        super().__init__()
        self.index, self.settings = index, settings
        self.qkv: nn.Module = qkv
        self.mlp = mlp
        self.output: nn.Module = output
        self.inputs = inputs


class TokenInputs(nn.Module):
    """Each layer's own inputs (Gemma 4): [L, P] numbers, computed from a token's row and its id.

    They are (norm(projection(row) row_factor) + embed(id)) factor, the norm over P.
    """

    def __init__(
        self, embed: nn.Module, projection: nn.Module, norm: Norm, *, row_factor: float, factor: float
    ) -> None:
        super().__init__()
        self.embed, self.projection, self.norm = embed, projection, norm
        self.row_factor, self.factor = row_factor, factor


class FusedDecoder(nn.Module):
    """Embedding, layers, last norm and output layer; `kind` is the model's class in transformers, `geometry`
    what this keeps of a token.

    `positions`, if not None, is the embedding of positions, added to that of tokens (GPT-2); `softcap`
    bounds the logits, with tanh (Gemma 2). Rows of the embedding and logits may have a factor (Granite).
    `embedded` [V] int64 says which token is embedded in place of each; None where each is embedded as itself.
    """

    def __init__(
        self,
        kind: str,
        geometry: Geometry,
        *,
        embed: nn.Embedding,
        layers: list[FusedLayer],
        norm: Norm,
        head: nn.Module,
        ropes: list[Rope],
        softcap: float | None,
        positions: nn.Embedding | None,
        embedding_factor: float,
        logit_factor: float,
        inputs: TokenInputs | None,
        embedded: Tensor | None,
    ) -> None:
        super().__init__()
        self.embedded = embedded
        self.kind, self.geometry = kind, geometry
        self.inputs = inputs
        self.embedding_factor, self.logit_factor = embedding_factor, logit_factor
        self.norm = norm
        self.embed: nn.Module = embed
        self.positions = positions
        self.head = head
        self.layers = nn.ModuleList(layers)
        self.stack = layers
        self.ropes, self.softcap = ropes, softcap

    def let_go(self) -> None:
        """Drop the weights of experts that were packed: the module that replaced `own` has its own copy."""
        for layer in self.stack:
            if isinstance(layer.mlp, Experts) and not list(layer.mlp.own.parameters()):
                del layer.mlp.gate_up, layer.mlp.down

    @property
    def gates(self) -> list[str]:
        """Names of the linear layers whose product may apply its gate, which is SiLU(gate) up."""
        return [
            f"layers.{layer.index}.mlp.gate.gate_up"
            for layer in self.stack
            if isinstance(layer.mlp, GatedMlp) and layer.mlp.gate.activation is silu
        ]
