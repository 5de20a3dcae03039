"""Layers with the gated delta rule, whose candidates a kernel of CPUs computes.

A state is large, and few candidates are kept. So a candidate has none of its own, but the state before its
step and the inputs of its path since. The next step makes its state of these, with the same bits as before.

Shapes: N packed tokens, n candidates of a step, H value heads of key width K and value width V, T taps of the
convolution and C its channels, W = C + 2 H numbers that are a candidate's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.engine.cpu.layer import runs
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.recurrent.pieces import Family, Made

_STATE, _INPUTS_BEHIND = "behind", "inputs"
"""Of a candidate: the state before its step, and the inputs [1, W] of its path, by their places."""


def _of_qwen3_5(module: Any, made: Made) -> tuple[list[Tensor], Tensor]:
    return [made[module.in_proj_qkv], made[module.in_proj_b], made[module.in_proj_a]], made[module.in_proj_z]


def _of_qwen3_next(module: Any, made: Made) -> tuple[list[Tensor], Tensor]:
    rows = made[module.in_proj_qkvz][None], made[module.in_proj_ba][None]
    query, key, value, gate, beta, decay = (
        part.flatten(2)[0] for part in module.fix_query_key_value_ordering(*rows)
    )
    return [query, key, value, beta, decay], gate


def _of_olmo(module: Any, made: Made) -> tuple[list[Tensor], Tensor]:
    parts = module.q_proj, module.k_proj, module.v_proj, module.b_proj, module.a_proj
    return [made[part] for part in parts], made[module.g_proj]


_INPUTS: dict[str, Callable[[Any, Made], tuple[list[Tensor], Tensor]]] = {
    "Qwen3_5GatedDeltaNet": _of_qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _of_qwen3_5,
    "Qwen3NextGatedDeltaNet": _of_qwen3_next,
    "OlmoHybridGatedDeltaNet": _of_olmo,
}
"""By class: parts of the inputs, [N, W] together, and the gates [N, H V]."""


def computes(module: Any, inputs: Sequence[nn.Module], output: nn.Module | None) -> bool:
    """True for a module that `DeltaRule` knows, and whose linear layers are `inputs` and `output` alone."""
    if type(module).__name__ not in _INPUTS or module.activation not in ("silu", "swish"):
        return False
    linears = {child for child in module.modules() if hasattr(child, "out_features")}
    weight = module.conv1d.weight
    plain = module.conv1d.bias is None and _norm(module).weight.dtype == weight.dtype
    return plain and linears == {*inputs, output} and runs(weight.dtype, weight.device)


def _norm(module: Any) -> Any:
    return module.o_norm if hasattr(module, "o_norm") else module.norm


class _Call(NamedTuple):
    """What the kernel is to compute; tensors are here so that they live."""

    arguments: tuple[int, ...]
    room: int
    """Bytes."""
    whole: Any
    """The state before the candidates."""
    alive: tuple[Tensor, ...]


_NOBODY = Family({}, [], [])


class DeltaRule:
    """The candidates of one module, of which it keeps states [H, K, V]."""

    def __init__(self, module: Any, workers: WorkerPool) -> None:
        from outrider.engine.cpu.kernels.delta_rule import delta_rule, room_bytes

        weight, norm = module.conv1d.weight, _norm(module)
        self._module, self._workers, self._inputs = module, workers, _INPUTS[type(module).__name__]
        self._kernel = delta_rule(str(weight.dtype).removeprefix("torch."))
        self._room_bytes = room_bytes
        self._channels, _, self._taps = weight.shape
        self._heads, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
        self._shape = module.head_k_dim, module.head_v_dim, group
        self.width: int = module.num_v_heads * module.head_v_dim
        """Of what goes into the last linear layer."""
        with torch.inference_mode():
            self._weights = weight[:, 0].t().float().contiguous()
            self._rates, self._offsets = module.A_log.float().exp(), module.dt_bias.float().contiguous()
            self._scale = norm.weight.float().contiguous()
        constants = (each.data_ptr() for each in (self._rates, self._offsets, self._scale))
        shape = self._heads, group, *self._shape[:2]
        self._model = self._weights.data_ptr(), self._taps, *constants, *shape
        self._most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        self._eps: float = norm.variance_epsilon

    def __call__(self, index: int, families: Sequence[Family], made: Made, results: Tensor) -> None:
        """Write what candidates become, but for the last linear layer, to their rows of `results` [N, H V].

        They get their states, as those of layer `index`.
        """
        if not families:
            return
        parts, gates = self._inputs(self._module, made)
        gates = gates.contiguous()
        rows = torch.tensor([piece.row for family in families for piece in family.pieces])
        packed = torch.cat(parts, -1).index_select(0, rows)
        # Copies: a candidate that is kept does not keep the inputs of other sequences.
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
                piece.after[index] = {_STATE: call.whole, _INPUTS_BEHIND: dict(enumerate(path))}

    def whole(self, state: Any) -> Any:
        """The same state as transformers' cache has it."""
        if _INPUTS_BEHIND not in state:
            return state
        nothing = self._weights.new_empty(0)
        call = self._call(state, _NOBODY, nothing, nothing, nothing)
        self._run([call])
        return call.whole

    def _call(self, state: Any, family: Family, inputs: Tensor, gates: Tensor, results: Tensor) -> _Call:
        """`inputs` [n, W] are the family's own."""
        certain = list(state.get(_INPUTS_BEHIND, {}).values())
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
        return _Call(
            (places[0], nodes, len(certain), *places[1:]),
            self._room_bytes(self._taps, nodes, levels, *self._shape),
            whole,
            (table, before, past, inputs, gates, *certain),
        )

    def _run(self, calls: Sequence[_Call]) -> None:
        """Shared by the workers: each takes some heads of a call."""
        size = self._workers.size(sum(call.arguments[1] for call in calls))
        share = -(-self._heads // size)
        room = self._workers.room(1 << max(call.room for call in calls).bit_length())

        def work(member: int, part: tuple[_Call, int]) -> None:
            call, first = part
            heads = first, min(first + share, self._heads)
            self._kernel(*call.arguments, *self._model, *heads, room[member], self._most, self._eps)

        parts = [(call, head) for call in calls for head in range(0, self._heads, share)]
        self._workers.share(size, parts, work)


def _table(
    family: Family, certain: Sequence[Tensor], inputs: Tensor, gates: Tensor, results: Tensor
) -> Tensor:
    """[4, nodes] int64, as the kernel takes it."""
    blank, places = [0] * len(certain), range(len(certain))
    inputs_at = [row.data_ptr() for row in (*certain, *inputs)]
    rows_at = [
        blank + [rows.data_ptr() + piece.row * rows.stride(0) * rows.itemsize for piece in family.pieces]
        for rows in (gates, results)
    ]
    return torch.tensor([inputs_at, *rows_at, [*places, *(len(certain) + place for place in family.places)]])
