"""Runs the recurrent layers of a model from the states of the sequences in a step.

The model's own modules compute; for known modules a rule computes all candidates at once. Linear layers that
read a module's input, or make its output, run once for all tokens of a step, because they read most of the
weights.

Shapes: N packed tokens, C width of the model, B pieces of a batch, n tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.kv.kept_states import part, size_of
from outrider.engine.recurrent import delta_rule, short_convolution, state_space
from outrider.engine.recurrent.delta_rule import DeltaRule
from outrider.engine.recurrent.pieces import Batch, Family, States, batches_of, families_of
from outrider.engine.recurrent.probing import StatefulModule, forward_of, recurrent_modules
from outrider.engine.recurrent.replay import Replay
from outrider.engine.recurrent.short_convolution import ShortConvolution
from outrider.engine.recurrent.state_space import StateSpace
from outrider.engine.step import Segment

MAX_BYTES = 2**30
"""Most bytes of the states of one sequence's candidates."""


class RecurrentLayers:
    """The recurrent layers of a model, which from now on work on the states of a runner's sequences."""

    def __init__(self, network: PreTrainedModel, modules: Sequence[nn.Module], workers: WorkerPool) -> None:
        cache, width = DynamicCache(config=network.config), network.config.get_text_config().hidden_size
        self._layers = [_Layer(module, cache, width, workers) for module in modules]
        self.state_bytes = sum(layer.state_bytes for layer in self._layers)
        """Bytes of all layers' states after one token."""

    def candidates(self, wanted: int) -> int:
        """Return how many candidates of one sequence may have states: `wanted`, or fewer if memory is
        short."""
        return min(wanted, max(MAX_BYTES // self.state_bytes, 1))

    def begin(self, segments: Sequence[Segment], first_rows: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward of these segments; see `batches_of`."""
        batches = batches_of(segments, first_rows, device)
        families, others = families_of(batches)
        for layer in self._layers:
            layer.batches, layer.families = (batches, []) if layer.rule is None else (others, families)


def recurrent_layers(network: PreTrainedModel, workers: WorkerPool | None = None) -> RecurrentLayers | None:
    """The recurrent layers of a model, if it has any; kernels share their work between `workers`."""
    modules = recurrent_modules(network)
    return RecurrentLayers(network, modules, workers or WorkerPool()) if modules else None


class _Layer:
    """One recurrent module, whose `forward` this replaces."""

    def __init__(self, module: Any, cache: DynamicCache, width: int, workers: WorkerPool) -> None:
        self.batches: Sequence[Batch] = ()
        self.families: Sequence[Family] = ()
        for child in module.modules():
            vars(child).pop("forward", None)  # set by an earlier runner
        self._index: int = module.layer_idx
        self._module = StatefulModule(module, cache, width)
        self._at_once = self._module.reads_all_of_a_state()
        """True if the module computes several tokens after a state at once."""
        self.state_bytes = size_of(self._module.example)
        self._inputs, self._output = self._module.linear_ends(module)
        self.rule = self._rule_of(module, workers)
        """What computes `families`; None: the module computes all batches."""
        self._made: dict[nn.Module, Tensor] = {}
        """The results [N, out] for all tokens of the linear layers that read the input."""
        self._batch: Batch
        """The batch that is being computed."""
        for linear in self._inputs:
            linear.forward = partial(self._rows_of, linear)
        if self._output is not None:
            self._output.forward = lambda x: x
        module.forward = self.compute

    def _rule_of(self, module: Any, workers: WorkerPool) -> Replay | ShortConvolution | None:
        ends = self._inputs, self._output
        if delta_rule.computes(module, *ends):
            return DeltaRule(module, workers)
        if state_space.computes(module, *ends):
            return StateSpace(module, workers)
        return ShortConvolution(module) if short_convolution.computes(module, *ends) else None

    def compute(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """[1, N, C] -> [1, N, C]; padding is computed as zeros."""
        hidden = hidden_states[0]
        read = hidden if self._module.factor == 1.0 else hidden * self._module.factor
        self._made = {linear: forward_of(linear)(read) for linear in self._inputs}
        computed = [self._computed(hidden, batch) for batch in self.batches]
        if self.rule is None:
            result = computed[0].new_zeros(len(hidden), computed[0].shape[-1])
        else:
            result = hidden.new_zeros(len(hidden), self.rule.width)
            self.rule(self._index, self.families, self._made, result)
        for batch, made in zip(self.batches, computed, strict=True):
            result.index_copy_(0, batch.rows, made.flatten(0, 1))
        return (result if self._output is None else forward_of(self._output)(result))[None]

    def _computed(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return a batch's result [B, n, ...] before the last linear layer, and give its pieces their
        states."""
        fresh = self._module.fresh
        given = [fresh if piece.before is None else self._whole(piece.before) for piece in batch.pieces]
        state = self._module.enter(given)
        steps = [batch] if self._at_once or batch.begins else batch.tokens()
        made = torch.cat([self._step(hidden, step) for step in steps], 1)
        for index, piece in enumerate(batch.pieces):
            piece.after[self._index] = part(state, index)
        return made

    def _whole(self, states: States) -> Any:
        """Return this layer's state among the states of all layers."""
        state = states[self._index]
        return state if self.rule is None else self.rule.whole(state)

    def _step(self, hidden: Tensor, batch: Batch) -> Tensor:
        self._batch = batch
        made: Tensor = self._module(_rows(hidden, batch))
        return made

    def _rows_of(self, linear: nn.Module, _: Tensor) -> Tensor:
        """Return a linear layer's result for the batch."""
        return _rows(self._made[linear], self._batch)


def _rows(packed: Tensor, batch: Batch) -> Tensor:
    """Select a batch's rows: [N, ...] -> [B, n, ...]."""
    return packed.index_select(0, batch.rows).view(len(batch.pieces), batch.count, -1)
