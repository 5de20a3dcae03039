"""Layers with the gated delta rule, whose candidates a kernel of CPUs computes.

Shapes: N packed tokens, H value heads of key width K and value width V, C channels of the convolution,
W = C + 2 H numbers that are a candidate's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu.layer import runs
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.recurrent.pieces import Made
from outrider.engine.recurrent.replay import Replay


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
"""By class, the function that returns parts of the inputs, [N, W] together, and the gates [N, H V]."""


def computes(module: Any, inputs: Sequence[nn.Module], output: nn.Module | None) -> bool:
    """True for a module that `DeltaRule` knows, and whose only linear layers are `inputs` and `output`."""
    if type(module).__name__ not in _INPUTS or module.activation not in ("silu", "swish"):
        return False
    linears = {child for child in module.modules() if hasattr(child, "out_features")}
    weight = module.conv1d.weight
    plain = module.conv1d.bias is None and _norm(module).weight.dtype == weight.dtype
    return plain and linears == {*inputs, output} and runs(weight.dtype, weight.device)


def _norm(module: Any) -> Any:
    return module.o_norm if hasattr(module, "o_norm") else module.norm


class DeltaRule(Replay):
    """The candidates of one module, of which it keeps states [H, K, V]."""

    def __init__(self, module: Any, workers: WorkerPool) -> None:
        from outrider.engine.cpu.kernels.delta_rule import delta_rule, room_bytes

        super().__init__(module.conv1d, workers)
        norm, self._module, self._inputs = _norm(module), module, _INPUTS[type(module).__name__]
        self._kernel = delta_rule(self._kind)
        self._heads, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
        self._widths = module.head_k_dim, module.head_v_dim, group
        self._room_bytes = room_bytes
        self.width = module.num_v_heads * module.head_v_dim
        with torch.inference_mode():
            self._rates, self._offsets = module.A_log.float().exp(), module.dt_bias.float().contiguous()
            self._scale = norm.weight.float().contiguous()
        constants = (each.data_ptr() for each in (self._rates, self._offsets, self._scale))
        most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        self._model = *self._convolution, *constants, self._heads, group, *self._widths[:2]
        self._factors = most, norm.variance_epsilon

    def _split(self, made: Made) -> tuple[list[Tensor], Tensor]:
        return self._inputs(self._module, made)
