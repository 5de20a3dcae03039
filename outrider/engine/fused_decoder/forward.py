"""The forward of decoder layers with norms, attention with grouped queries and an MLP.

    one product for queries, keys and values; rotation, storing and attention; output product
    residual add and norm; one product for gate and up, and the gate; down product (or experts)
    residual add and the next layer's norm

Llama, Mistral, Qwen, Phi, Gemma, OLMo 2, gpt-oss, GPT-2, GPT-NeoX and their like, on every device. It
computes what the model's own modules compute with a third of the operations: at decoding sizes an operation
costs more than its arithmetic. The self check at load compares the two. What lies between the products is the
device's: see `Operations`.

Shapes: N packed tokens, M of them or the W wanted ones, C hidden width, Q query heads, H kv heads, D head
width, F width of the MLP, V vocabulary, K experts of a token; L layers, P numbers of a token that a layer
gets by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from outrider.engine.features import FeatureTap
from outrider.engine.fused_decoder.decoder import (
    Experts,
    ForeignMlp,
    FusedDecoder,
    FusedLayer,
    Gate,
    GatedMlp,
    LayerSettings,
    Norm,
    PlainMlp,
    Router,
)


class Inputs(Protocol):
    """What a forward needs of a step, `outrider.engine.step.PackedStep` or a device's."""

    @property
    def tokens(self) -> Tensor:
        """[1, N] int64."""

    @property
    def positions(self) -> Tensor:
        """[1, N] int64."""

    @property
    def wanted(self) -> Tensor:
        """[W] int64, packed positions whose logits are wanted."""


StepT = TypeVar("StepT", bound=Inputs, contravariant=True)
Shared = TypeVar("Shared")
Linear: TypeAlias = Callable[[Tensor], Tensor]
AddNorm: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""Add the second to the first [M, C], where it is, and return the norm of the sum; None adds nothing."""
Mix: TypeAlias = Callable[[Tensor, Shared], Tensor]
"""Store keys and values of qkv [N, Q + 2 H, D], which it may overwrite, and return what each token sees,
[N, Q * D]."""

Choose: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of rows [M, C] the experts [M, K] int64 that each one goes through, and their shares [M, K] float32."""
ExpertSum: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of rows [M, C] and what `Choose` gives of them, the sum of experts' results times their shares [M, C]."""
TakeInputs: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of rows [M, C] and a layer's own inputs of them [M, P], what is added to the rows [M, C]."""


class Operations(ABC, Generic[StepT, Shared]):
    """What a device computes between the products, as functions that are made once for each layer."""

    @abstractmethod
    def begin(self, step: StepT) -> Shared:
        """What all layers need of a step."""

    @abstractmethod
    def norm(self, norm: Norm | None) -> AddNorm:
        """See `AddNorm`; without a norm the sum itself."""

    @abstractmethod
    def mix(self, layer: FusedLayer) -> Mix[Shared]:
        """See `Mix`."""

    @abstractmethod
    def activation(self, mlp: PlainMlp) -> Linear:
        """What lies between the products of an MLP without a gate; may overwrite its argument."""

    def gate(self, gate: Gate) -> Linear:
        """The product, and the gate where the product does not open it."""
        called: Linear = gate.gate_up.forward if gate.opened else gate.forward
        return called

    def router(self, router: Router) -> Choose:
        """See `Choose`; by torch."""
        called: Choose = router.forward
        return called

    def experts(self, experts: Experts) -> ExpertSum:
        """See `ExpertSum`; as transformers computes them, or what took their place."""
        called: ExpertSum = experts.own.forward
        return called


class _Layer(NamedTuple, Generic[Shared]):
    """One layer's functions by name: looking them up in modules takes as long as calling them."""

    qkv: Linear
    heads: tuple[int, int]
    """Q + 2 H, or Q + H with latents, and D."""
    mix: Mix[Shared]
    output: Linear
    mlp_norm: AddNorm
    mlp: Linear
    inputs: TakeInputs | None
    next_norm: AddNorm


class FusedForward(Generic[StepT, Shared]):
    """Runs a decoder with the linear layers that it has now, so make it after they were packed.

    Nothing depends on values in tensors but what the operations do.
    """

    def __init__(
        self, decoder: FusedDecoder, operations: Operations[StepT, Shared], tap: FeatureTap | None = None
    ) -> None:
        """`tap` may take what goes into layers."""
        first, stack = decoder.stack[0].settings, decoder.stack
        norms = [*(layer.settings.input_norm for layer in stack[1:]), decoder.norm]
        self._begin, self._tap = operations.begin, tap or FeatureTap()
        self._embed, self._head = _embedding(decoder), _logits(decoder)
        self._inputs = _token_inputs(decoder, operations)
        self._first_norm = operations.norm(first.input_norm)
        self._layers = [_functions(layer, norm, operations) for layer, norm in zip(stack, norms, strict=True)]

    def __call__(self, step: StepT) -> Tensor:
        """Logits [W, V] of the step's wanted tokens."""
        hidden = self._embed(step)
        shared, inputs, count = self._begin(step), self._inputs(step, hidden), hidden.shape[0]
        normed, last = self._first_norm(hidden, None), len(self._layers) - 1
        tapped = bool(self._tap.layers)
        for i, (qkv, heads, mix, output, mlp_norm, mlp, take, next_norm) in enumerate(self._layers):
            if tapped:
                self._tap.take(i, hidden)
            mixed = mix(qkv(normed).view(count, *heads), shared)
            if i == last:  # what follows is needed for the wanted rows only
                hidden, mixed = hidden.index_select(0, step.wanted), mixed.index_select(0, step.wanted)
                inputs = None if inputs is None else inputs.index_select(0, step.wanted)
            added = mlp(mlp_norm(hidden, output(mixed)))
            if inputs is not None and take is not None:
                added = take(hidden.add_(added), inputs[:, i])
            normed = next_norm(hidden, added)
        return self._head(normed)


def _functions(
    layer: FusedLayer, next_norm: Norm | None, operations: Operations[StepT, Shared]
) -> _Layer[Shared]:
    settings = layer.settings
    return _Layer(
        layer.qkv.forward,
        (settings.query_heads + settings.stored, settings.head_dim),
        operations.mix(layer),
        _times(_normed(layer.output.forward, settings.output_norm, operations), settings.added_factor),
        _mlp_norm(settings, operations),
        _times(_normed(_mlp(layer, operations), settings.down_norm, operations), settings.added_factor),
        _take_inputs(layer, operations),
        _behind_factor(operations.norm(next_norm), settings.factor),
    )


def _embedding(decoder: FusedDecoder) -> Callable[[Inputs], Tensor]:
    """Rows [N, C] of a step's tokens, and of their positions where the model embeds them."""
    embed, tokens = _times(decoder.embed.forward, decoder.embedding_factor), _tokens(decoder)
    if decoder.positions is None:
        return lambda step: embed(tokens(step))
    place = decoder.positions.forward
    return lambda step: embed(tokens(step)).add_(place(step.positions[0]))


def _tokens(decoder: FusedDecoder) -> Callable[[Inputs], Tensor]:
    """The tokens [N] that a step embeds."""
    embedded = decoder.embedded
    if embedded is None:
        return lambda step: step.tokens[0]
    return lambda step: embedded.index_select(0, step.tokens[0])


def _token_inputs(
    decoder: FusedDecoder, operations: Operations[StepT, Shared]
) -> Callable[[Inputs, Tensor], Tensor | None]:
    """What layers get of a step's tokens by themselves, [N, L, P], where the model has that."""
    given = decoder.inputs
    if given is None:
        return lambda step, hidden: None
    width, norm = len(given.norm.weight), operations.norm(given.norm)
    embed, project = given.embed.forward, _times(given.projection.forward, given.row_factor)
    factor, tokens = given.factor, _tokens(decoder)

    def inputs(step: Inputs, hidden: Tensor) -> Tensor:
        rows = norm(project(hidden).view(-1, width), None).view(len(hidden), -1)
        return rows.add_(embed(tokens(step))).mul_(factor).view(len(hidden), -1, width)

    return inputs


def _take_inputs(layer: FusedLayer, operations: Operations[StepT, Shared]) -> TakeInputs | None:
    mlp = layer.inputs
    if mlp is None:
        return None
    up, activate = mlp.up.forward, operations.activation(mlp)
    down = _normed(mlp.down.forward, layer.settings.inputs_norm, operations)
    return lambda hidden, inputs: down(activate(up(hidden)).mul_(inputs))


def _behind_factor(norm: AddNorm, factor: float) -> AddNorm:
    """A norm of rows that get a factor where they are."""
    if factor == 1.0:
        return norm

    def norm_of_times(hidden: Tensor, added: Tensor | None) -> Tensor:
        if added is not None:
            hidden.add_(added)
        return norm(hidden.mul_(factor), None)

    return norm_of_times


def _mlp_norm(settings: LayerSettings, operations: Operations[StepT, Shared]) -> AddNorm:
    norm = operations.norm(settings.mlp_norm)
    if not settings.parallel:
        return norm

    def norm_before_adding(hidden: Tensor, added: Tensor | None) -> Tensor:
        normed = norm(hidden, None)
        if added is not None:
            hidden.add_(added)
        return normed

    return norm_before_adding


def _mlp(layer: FusedLayer, operations: Operations[StepT, Shared]) -> Linear:
    mlp = layer.mlp
    if isinstance(mlp, ForeignMlp):
        foreign: Linear = mlp.forward
        return foreign
    if isinstance(mlp, Experts):
        choose, sums, together = operations.router(mlp.router), operations.experts(mlp), mlp.together
        if together is not None:
            return lambda x: together(sums(x, *choose(x)))
        return lambda x: sums(x, *choose(x))
    down = mlp.down.forward
    if isinstance(mlp, GatedMlp):
        gate = operations.gate(mlp.gate)
        return lambda x: down(gate(x))
    up, activate = mlp.up.forward, operations.activation(mlp)
    return lambda x: down(activate(up(x)))


def _normed(product: Linear, norm: Norm | None, operations: Operations[StepT, Shared]) -> Linear:
    """What a product gives, normed before it is added where the model does that."""
    if norm is None:
        return product
    behind = operations.norm(norm)
    return lambda x: behind(product(x), None)


def _times(function: Linear, factor: float) -> Linear:
    """What a function gives, times a factor where the model has one."""
    return function if factor == 1.0 else lambda x: function(x) * factor


def _logits(decoder: FusedDecoder) -> Linear:
    head, softcap = _times(decoder.head.forward, decoder.logit_factor), decoder.softcap
    if softcap is None:
        return head
    return lambda x: torch.tanh(head(x) / softcap) * softcap
