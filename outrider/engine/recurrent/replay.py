"""Layers whose candidates a CPU kernel computes, from a large state and the inputs since.

A state is large, and few candidates are kept. So a candidate has no state of its own, but the state before
its step and the inputs on its path since. The next step computes its state from these, with the same bits as
before.

Shapes: N packed tokens, n candidates of a step, T taps of the convolution and C its channels, W numbers of a
candidate's inputs, of which the first C are the convolution's, D numbers of its result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.engine.cpu.backend import kind_of
from outrider.engine.cpu.recording import bits_of
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.recurrent.pieces import Family, Made

_STATE, _INPUTS = "state", "inputs"
"""Keys of a candidate's state: the state before its step, and the inputs [1, W] on its path, by their
places."""


class Call(NamedTuple):
    """What the kernel has to compute. It holds tensors only to keep them alive."""

    arguments: tuple[int, ...]
    room: int
    """Bytes of scratch memory."""
    whole: Any
    """The state before the candidates."""
    alive: tuple[Tensor, ...]


_NOBODY = Family({}, [], [])


class Replay(ABC):
    """The candidates of one module with a convolution and heads, whose kernel a subclass names."""

    _kernel: Callable[..., None]
    _room_bytes: Callable[..., int]
    """The kernel's function for the bytes of scratch memory that a call takes."""
    _widths: tuple[int, ...]
    """The last arguments of that function."""
    _heads: int
    """The heads, which the workers share."""
    _model: tuple[int, ...]
    """Numbers of a job that come after those of any kernel."""
    _factors: tuple[float, ...]
    """Numbers of a job that come last, as float64."""
    width: int
    """D, the width of the last linear layer's input."""

    def __init__(self, convolution: nn.Conv1d, workers: WorkerPool) -> None:
        weight, bias = convolution.weight, convolution.bias
        self._workers, self._kind = workers, kind_of(weight.dtype)
        self._channels, _, self._taps = weight.shape
        with torch.inference_mode():
            self._weights = weight[:, 0].t().float().contiguous()
            self._bias = None if bias is None else bias.float().contiguous()
        self._convolution = (
            self._weights.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            self._taps,
        )

    @abstractmethod
    def _split(self, made: Made) -> tuple[list[Tensor], Tensor]:
        """Return parts of the inputs, [N, W] together, and the gates [N, D]."""

    def _end(self, call: Call) -> None:
        """Finish a call after the kernel is done with all its heads; does nothing here."""
        return

    def __call__(self, index: int, families: Sequence[Family], made: Made, results: Tensor) -> None:
        """Write the candidates' results before the last linear layer to their rows of `results` [N, D].

        Each candidate gets its state for layer `index`.
        """
        if not families:
            return
        parts, gates = self._split(made)
        gates = gates.contiguous()
        rows = torch.tensor([piece.row for family in families for piece in family.pieces])
        packed = torch.cat(parts, -1).index_select(0, rows)
        # Copies, so that a kept candidate does not keep the inputs of other sequences alive.
        inputs = [own.clone() for own in torch.split(packed, [len(family.pieces) for family in families])]
        calls = [
            self._call(family.before[index], family, own, gates, results)
            for family, own in zip(families, inputs, strict=True)
        ]
        self._run(calls)
        for call, family, own in zip(calls, families, inputs, strict=True):
            path: list[Tensor] = []
            for place, piece, row in zip(family.places, family.pieces, own[:, None], strict=True):
                path[place:] = [row]
                piece.after[index] = {_STATE: call.whole, _INPUTS: dict(enumerate(path))}

    def whole(self, state: Any) -> Any:
        """Return the state in the form of transformers' cache."""
        if _INPUTS not in state:
            return state
        nothing = self._weights.new_empty(0)
        call = self._call(state, _NOBODY, nothing, nothing, nothing)
        self._run([call])
        return call.whole

    def _call(self, state: Any, family: Family, inputs: Tensor, gates: Tensor, results: Tensor) -> Call:
        """`inputs` [n, W] are the family's own."""
        certain = list(state.get(_INPUTS, {}).values())
        whole = state[_STATE] if certain else state
        past = whole["conv_states"][0][0].t().contiguous()
        before = after = whole["recurrent_states"][0].contiguous()
        if certain:
            after = torch.empty_like(before)
            kept = torch.cat([past, *(row[:, : self._channels] for row in certain)])[-self._taps :]
            whole = {**whole, "conv_states": {0: kept.t()[None]}, "recurrent_states": {0: after}}
        table = _table(family, certain, inputs, gates, results)
        nodes, levels = table.shape[1], max(family.places, default=-1) + 1
        places = [each.data_ptr() for each in (table, before, after, past)]
        return Call(
            (places[0], nodes, len(certain), *places[1:]),
            self._room_bytes(self._taps, nodes, levels, *self._widths),
            whole,
            (table, before, past, inputs, gates, *certain),
        )

    def _run(self, calls: Sequence[Call]) -> None:
        """Run the calls. The workers share them: each takes some heads of a call."""
        size = self._workers.size(sum(call.arguments[1] for call in calls))
        shares = min(size, self._heads)
        room = self._workers.room_that_grows(max(call.room for call in calls))
        factors = [bits_of(factor) for factor in self._factors]
        table = array("q")
        for call in calls:
            numbers = shares, *call.arguments, *room, *self._model, *factors
            table.extend((1 + len(numbers), *numbers))
        self._workers.run(self._kernel, table, len(calls) * shares, size)
        for call in calls:
            self._end(call)


def _table(
    family: Family, certain: Sequence[Tensor], inputs: Tensor, gates: Tensor, results: Tensor
) -> Tensor:
    """Return the table [4, nodes] int64 that the kernel reads."""
    blank, places = [0] * len(certain), range(len(certain))
    inputs_at = [row.data_ptr() for row in (*certain, *inputs)]
    rows_at = [
        blank + [rows.data_ptr() + piece.row * rows.stride(0) * rows.itemsize for piece in family.pieces]
        for rows in (gates, results)
    ]
    return torch.tensor([inputs_at, *rows_at, [*places, *(len(certain) + place for place in family.places)]])
