"""Layers with Mamba-2's state space, whose candidates a kernel of CPUs computes.

Shapes: N packed tokens, H heads of width P with states of width S, C channels of the convolution, W = C + H
numbers that are a candidate's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.cpu.layer import runs
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.recurrent.pieces import Made
from outrider.engine.recurrent.replay import Call, Replay

_KNOWN = ("BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer")


def computes(module: Any, inputs: Sequence[nn.Module], output: nn.Module | None) -> bool:
    """True for a module that `StateSpace` knows, and whose only linear layers are `inputs` and `output`.

    Falcon H1 is only supported without a norm, as in its published models.
    """
    if type(module).__name__ not in _KNOWN or module.activation not in ("silu", "swish"):
        return False
    weight, numbers = module.conv1d.weight, [module.D, module.dt_bias]
    if hasattr(module, "mup_vector"):
        if module.mamba_rms_norm:
            return False
        numbers.append(module.mup_vector)
    else:
        numbers.append(module.norm.weight)
    plain = all(each.dtype == weight.dtype for each in numbers)
    ends = [*inputs, output] == [module.in_proj, module.out_proj]
    return plain and ends and runs(weight.dtype, weight.device)


class StateSpace(Replay):
    """The candidates of one module, of which it keeps states [H, P, S]."""

    def __init__(self, module: Any, workers: WorkerPool) -> None:
        from outrider.engine.cpu.kernels.state_space import gated_norm, room_bytes, state_space

        super().__init__(module.conv1d, workers)
        self._kernel, self._room_bytes = state_space(self._kind), room_bytes
        self._input, self._multipliers = module.in_proj, getattr(module, "mup_vector", None)
        self._heads, self._widths = module.num_heads, (module.head_dim, module.ssm_state_size)
        self.width = module.num_heads * module.head_dim
        with torch.inference_mode():
            self._rates = -module.A_log.float().exp()
            self._offsets, self._direct = (each.float().contiguous() for each in (module.dt_bias, module.D))
        constants = (each.data_ptr() for each in (self._rates, self._offsets, self._direct))
        gated = self._multipliers is not None
        shape = module.num_heads, module.n_groups, *self._widths
        self._model = *self._convolution, *constants, int(gated), *shape
        self._factors = ()
        self._norm = None if gated else gated_norm(self._kind)
        if not gated:
            self._scale, self._eps = module.norm.weight.float().contiguous(), module.norm.variance_epsilon
            together = getattr(module.norm, "group_size", self.width)  # all, in transformers 5.17
            self._groups = self.width // together, together

    def _split(self, made: Made) -> tuple[list[Tensor], Tensor]:
        rows = made[self._input]
        if self._multipliers is not None:
            rows = rows * self._multipliers[0]
        gates, inputs = torch.split(rows, [self.width, self._channels + self._heads], -1)
        return [inputs], gates

    def _end(self, call: Call) -> None:
        if self._norm is not None:
            self._norm(*call.arguments[:3], self._scale.data_ptr(), *self._groups, self._eps)
