"""Recurrent layers: they keep a state of all earlier tokens where attention keeps keys and values.

Mamba, the gated delta rule and short convolutions are of this kind. A state cannot be cut back to an earlier
token, so each scratch entry of a sequence has the states behind it, and a commit keeps those of its last
token. States are never written to: a layer gets copies.

The model's own modules compute, from states in the cache of transformers. Tokens that are certain to stay, a
piece of a prompt, go through a layer at once. Candidates go level by level: those of all sequences that have
their parents' states. Linear layers that read a layer's input, or make its output, run once for all tokens.

Shapes: N packed tokens, C width of the model, B pieces that run together, n tokens of each.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from outrider.engine.kv.kept_states import joined, part, tensors_of
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.step import Segment
from outrider.protocol.errors import InternalError

States: TypeAlias = dict[int, Any]
"""What each recurrent layer keeps behind a token, by the layer's index."""
STATES_EVERY = 256
"""Tokens of a prompt from states to states that are kept for other sequences which begin alike."""
_CACHE_NAMES = ("cache_params", "past_key_values")


def recurrent_modules(network: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep states in transformers' cache: all begin with a convolution."""
    return [module for module in network.modules() if _is_recurrent(module)]


def _is_recurrent(module: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves and hasattr(module, "layer_idx") and _cache_name(module) != ""


def _cache_name(module: nn.Module) -> str:
    """How a module calls the cache that it is given; empty: it takes none."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), "")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that follow each other."""

    row: int
    """Packed position of the first."""
    before: States | None
    """Behind the token before them; None at the beginning of a text."""
    after: States = field(default_factory=dict)
    """Behind the last of them, filled in by each layer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces that a layer computes at once."""

    pieces: Sequence[Piece]
    count: int
    """n, the tokens of each piece."""
    rows: Tensor
    """[B * n] int64, their packed positions."""


def batches_of(segments: Sequence[Segment], first_rows: Sequence[int], device: torch.device) -> list[Batch]:
    """A step's tokens in the order in which a layer can compute them; `first_rows` are of the segments.

    The scratch entries that end a piece get its states.

    Raises:
        InternalError: an entry follows one in the middle of a piece, whose states nobody has.
    """
    levels: dict[tuple[int, int, bool], list[Piece]] = defaultdict(list)
    for segment, row in zip(segments, first_rows, strict=True):
        kv, depth = segment.kv, dict[int, int]()
        start = kv.scratch - len(segment.tokens)
        for at, count in _cut(segment, start):
            parent, last = kv.parents[at], at + count - 1
            piece = Piece(row + at - start, _before(kv, parent))
            depth[last] = depth.get(parent, -1) + 1
            levels[depth[last], count, piece.before is None].append(piece)
            kv.states[last] = piece.after
    ordered = sorted(levels.items(), key=lambda level: level[0])
    return [_batch(pieces, count, device) for (_, count, _), pieces in ordered]


def _cut(segment: Segment, start: int) -> Iterator[tuple[int, int]]:
    """The pieces of a segment whose scratch entries begin at `start`: the first one of each, and how many.

    What is certain to stay is cut where others may begin to differ, at the last full page and every so often.
    """
    stop = start + segment.certain
    if segment.certain:
        first = int(segment.kv.positions(start)[0])
        end = first + segment.certain
        cuts = {end - end % segment.kv.pool.page_size, *range(first - first % STATES_EVERY, end, STATES_EVERY)}
        places = [first, *sorted(cut for cut in cuts if first < cut < end), end]
        for here, there in pairwise(places):
            yield start + here - first, there - here
    for at in range(stop, segment.kv.scratch):
        yield at, 1


def _before(kv: SequenceKv, parent: int) -> States | None:
    """The states behind a scratch entry, or behind the last committed token; None where a text begins."""
    if parent < 0 and not kv.length:
        return None
    states: States | None = kv.states[parent] if parent >= 0 else kv.end_states
    if states is None:
        raise InternalError(f"scratch entry {parent} has no states of recurrent layers")
    return states


def _batch(pieces: Sequence[Piece], count: int, device: torch.device) -> Batch:
    rows = torch.tensor([piece.row for piece in pieces])[:, None] + torch.arange(count)
    return Batch(pieces, count, rows.flatten().to(device))


class RecurrentLayers:
    """The recurrent layers of a model, which work on the states of a runner's sequences from now on."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._cache = DynamicCache(config=network.config)
        width = network.config.get_text_config().hidden_size
        self._layers = [_Layer(module, self._cache, width) for module in recurrent_modules(network)]

    def __bool__(self) -> bool:
        return bool(self._layers)

    def begin(self, segments: Sequence[Segment], first_rows: Sequence[int], device: torch.device) -> None:
        """The next forward is of these segments; see `batches_of`."""
        batches = batches_of(segments, first_rows, device)
        for layer in self._layers:
            layer.batches = batches


class _Layer:
    """One module, and how its linear layers are shared by all batches of a step."""

    def __init__(self, module: Any, cache: DynamicCache, width: int) -> None:
        self.batches: Sequence[Batch] = ()
        self._index: int = module.layer_idx
        self._cache, self._cache_name = cache, _cache_name(module)
        self._fresh = vars(cache.layers[self._index])
        self._forward = _original(module)
        for child in module.modules():
            vars(child).pop("forward", None)  # that of an earlier runner
        self._inputs, self._output = _ends(module, width)
        """Linear layers that read the module's input, and the one that makes its output."""
        self._made: dict[nn.Module, Tensor] = {}
        """What the first have made of all tokens, [N, out]."""
        self._batch: Batch | None = None
        """The one that is computed."""
        self._continues = _continues(module, self._cache, self._cache_name, width)
        for linear in self._inputs:
            linear.forward = partial(self._taken, linear)
        if self._output is not None:
            self._output.forward = lambda x: x
        module.forward = self.compute

    def compute(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """[1, N, C] -> [1, N, C]; padding becomes what zeros become."""
        hidden = hidden_states[0]
        self._made = {linear: _original(linear)(hidden) for linear in self._inputs}
        result: Tensor | None = None
        for batch in self.batches:
            made = self._computed(hidden, batch)
            result = made.new_zeros(len(hidden), made.shape[-1]) if result is None else result
            result.index_copy_(0, batch.rows, made.flatten(0, 1))
        assert result is not None, "a step has tokens"
        return (result if self._output is None else _original(self._output)(result))[None]

    def _computed(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[B, n, ...] what a batch becomes, without the last linear layer; its pieces get their states."""
        given = [self._fresh if piece.before is None else piece.before[self._index] for piece in batch.pieces]
        state = copy.copy(self._cache.layers[self._index])
        vars(state).update(joined(given))
        self._cache.layers[self._index] = state
        at_once = self._continues or batch.pieces[0].before is None
        steps = [batch] if at_once else [_token(batch, index) for index in range(batch.count)]
        made = torch.cat([self._step(hidden, step) for step in steps], 1)
        for index, piece in enumerate(batch.pieces):
            piece.after[self._index] = part(vars(state), index)
        return made

    def _step(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[B, n, ...] what the tokens of a batch become behind the state in the cache, which they change."""
        self._batch = batch
        rows = hidden.index_select(0, batch.rows).view(len(batch.pieces), batch.count, -1)
        made: Tensor = self._forward(rows, **{self._cache_name: self._cache})
        return made

    def _taken(self, linear: nn.Module, _: Tensor) -> Tensor:
        """What a linear layer made of the batch."""
        batch = self._batch
        assert batch is not None, "inside of a batch"
        return self._made[linear].index_select(0, batch.rows).view(len(batch.pieces), batch.count, -1)


def _token(batch: Batch, index: int) -> Batch:
    """One token of each piece."""
    return Batch(batch.pieces, 1, batch.rows.view(-1, batch.count)[:, index])


def _continues(module: Any, cache: DynamicCache, cache_name: str, width: int) -> bool:
    """Whether a module reads all of a state when it takes several tokens; that of Jamba reads it for one."""
    forward, weight = _original(module), next(module.parameters())
    fresh = cache.layers[module.layer_idx]
    tokens = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(weight)

    def after(state: Any, tokens: Tensor) -> Any:
        cache.layers[module.layer_idx] = layer = copy.copy(fresh)
        vars(layer).update(joined([state]))
        with torch.inference_mode():
            made = forward(tokens, **{cache_name: cache})
        return {**vars(layer), "made": made}

    state = {**after(vars(fresh), tokens[:, :1])}
    del state["made"]
    others = [state, *(joined([state]) for _ in tensors_of(state))]
    for index, other in enumerate(others[1:]):
        list(tensors_of(other))[index].add_(1.0)
    ends = [list(tensors_of(after(other, tokens[:, 1:]))) for other in others]
    cache.layers[module.layer_idx] = fresh
    return not any(all(map(torch.equal, ends[0], end)) for end in ends[1:])


def _original(module: nn.Module) -> Callable[..., Any]:
    """A module's own forward."""
    return partial(type(module).forward, module)


def _ends(module: nn.Module, width: int) -> tuple[list[nn.Module], nn.Module | None]:
    """The linear layers that read a module's input as it comes, and the one whose output is the module's."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def note(linear: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        calls[linear] = given[0] if given else None, made

    linears = [child for child in module.modules() if hasattr(child, "out_features")]
    hooks = [linear.register_forward_hook(note) for linear in linears]
    weight = next(module.parameters())
    hidden = weight.new_zeros(1, 2, width)
    try:
        with torch.inference_mode():
            result = _original(module)(hidden)
    finally:
        for hook in hooks:
            hook.remove()
    readers = [linear for linear, (given, _) in calls.items() if given is hidden]
    return readers, next((linear for linear, (_, made) in calls.items() if made is result), None)
