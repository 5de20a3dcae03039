"""The forward of decoder layers with norms, attention with grouped queries and an MLP.

    one product for queries, keys and values; rotation, storing and attention; output product
    residual add and norm; one product for gate and up, and the gate; down product (or experts)
    residual add and the next layer's norm

Llama, Mistral, Qwen, Phi, Gemma, OLMo 2, gpt-oss, GPT-2, GPT-NeoX and their like, on every device. It
computes what the model's own modules compute with a third of the operations: at decoding sizes an operation
costs more than its arithmetic. The self check at load compares the two. What lies between the products
depends on the device: see `Operations`.

Shapes: N packed tokens, M rows (all N, or the W wanted ones), C hidden width, Q query heads, H kv heads, D
head width, F width of the MLP, V vocabulary, K experts of a token; L layers, P numbers per token in a layer's
own inputs.
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
"""Adds the second to the first [M, C] in place, and returns the norm of the sum; None adds nothing."""
Mix: TypeAlias = Callable[[Tensor, Shared], Tensor]
"""Stores keys and values of qkv [N, Q + 2 H, D], which it may overwrite, and returns the result of attention,
[N, Q * D]."""

Choose: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows [M, C] -> the experts [M, K] int64 that each row goes through, and their shares [M, K] float32."""
ExpertSum: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows [M, C] and the results of `Choose` for them -> the sum [M, C] of experts' results times their
shares."""
TakeInputs: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Rows [M, C] and the layer's own inputs for them [M, P] -> what is added to the rows [M, C]."""


class Operations(ABC, Generic[StepT, Shared]):
    """What a device computes between the products, as functions that are made once for each layer."""

    @abstractmethod
    def begin(self, step: StepT) -> Shared:
        """Return what all layers need from a step."""

    @abstractmethod
    def norm(self, norm: Norm | None) -> AddNorm:
        """See `AddNorm`; if `norm` is None, only the sum."""

    @abstractmethod
    def mix(self, layer: FusedLayer) -> Mix[Shared]:
        """See `Mix`."""

    @abstractmethod
    def activation(self, mlp: PlainMlp) -> Linear:
        """Return the activation of an MLP without a gate; it may overwrite its argument."""

    def bound(self, softcap: float) -> Linear:
        """Return what bounds logits by tanh; its argument stays as it is."""
        return lambda x: torch.tanh(x / softcap) * softcap

    def gate(self, gate: Gate) -> Linear:
        """Return the product followed by the gate, unless the product applies the gate itself."""
        called: Linear = gate.gate_up.forward if gate.opened else gate.forward
        return called

    def router(self, router: Router) -> Choose:
        """See `Choose`; by torch."""
        called: Choose = router.forward
        return called

    def experts(self, experts: Experts) -> ExpertSum:
        """See `ExpertSum`; by transformers' module, or by the one that replaced it."""
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
    """Runs a decoder with the linear layers that it has at construction, so construct it after packing.

    Only the operations depend on values in tensors.
    """

    def __init__(self, decoder: FusedDecoder, operations: Operations[StepT, Shared], tap: FeatureTap) -> None:
        """`tap` may take the inputs of layers, and of the output layer."""
        first, stack = decoder.stack[0].settings, decoder.stack
        norms = [*(layer.settings.input_norm for layer in stack[1:]), decoder.norm]
        self.begin, self._tap = operations.begin, tap
        self._embed = embedding(decoder)
        self._head = finished_logits(decoder, operations, decoder.head.forward)
        self._inputs = _token_inputs(decoder, operations)
        self._first_norm = operations.norm(first.input_norm)
        self._layers = [_functions(layer, norm, operations) for layer, norm in zip(stack, norms, strict=True)]

    def __call__(self, step: StepT) -> Tensor:
        """Logits [W, V] of the step's wanted tokens."""
        return self.compute(step, self.begin(step))

    def compute(self, step: StepT, shared: Shared) -> Tensor:
        """Logits [W, V] of the step's wanted tokens, from what `begin` returned for it."""
        hidden = self._embed(step)
        inputs, count = self._inputs(step, hidden), hidden.shape[0]
        normed, last = self._first_norm(hidden, None), len(self._layers) - 1
        tapped, whole = bool(self._tap.layers), last + 1 in self._tap.layers
        for i, (qkv, heads, mix, output, mlp_norm, mlp, take, next_norm) in enumerate(self._layers):
            if tapped:
                self._tap.take(i, hidden)
            mixed = mix(qkv(normed).view(count, *heads), shared)
            if i == last and not whole:  # what follows is needed for the wanted rows only
                hidden, mixed = hidden.index_select(0, step.wanted), mixed.index_select(0, step.wanted)
                inputs = None if inputs is None else inputs.index_select(0, step.wanted)
            added = mlp(mlp_norm(hidden, output(mixed)))
            if inputs is not None and take is not None:
                added = take(hidden.add_(added), inputs[:, i])
            normed = next_norm(hidden, added)
        if whole:
            self._tap.take(last + 1, normed)
            normed = normed.index_select(0, step.wanted)
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
        _after_factor(operations.norm(next_norm), settings.factor),
    )


def embedding(decoder: FusedDecoder) -> Callable[[Inputs], Tensor]:
    """Return what computes the rows [N, C] of a step's tokens, plus those of their positions where the model
    embeds positions."""
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
    """Return the layers' own inputs for a step's tokens, [N, L, P]; None where the model has none."""
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


def _after_factor(norm: AddNorm, factor: float) -> AddNorm:
    """Return a norm that first multiplies its rows by a factor in place."""
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
    """Return a product followed by a norm, where the model has one."""
    if norm is None:
        return product
    after = operations.norm(norm)
    return lambda x: after(product(x), None)


def _times(function: Linear, factor: float) -> Linear:
    """Return a function whose result is multiplied by a factor, unless the factor is 1."""
    return function if factor == 1.0 else lambda x: function(x) * factor


def finished_logits(decoder: FusedDecoder, operations: Operations[StepT, Shared], head: Linear) -> Linear:
    """Return the output layer `head` followed by the factor and the bound of logits."""
    scaled = _times(head, decoder.logit_factor)
    if decoder.softcap is None:
        return scaled
    bound = operations.bound(decoder.softcap)
    return lambda x: bound(scaled(x))
