"""Mixtures of experts on the CPU: each chosen expert is multiplied like a linear layer, with only its own
rows.

So a step reads each expert that its rows chose once, and a row's bits do not depend on its batch.

Shapes: M rows, K experts per row, S = M K pairs of a row and one of its experts, E experts, C hidden width,
F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from outrider.engine.cpu.backend import kind_of
from outrider.engine.cpu.matmul import Group, PanelProduct, multiply_groups
from outrider.engine.cpu.strips import alike
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.quantization.stacked import (
    DOWN,
    GATE_UP,
    bias_of,
    codes_of_experts,
    opens_by_silu,
    weights_of,
)

Make: TypeAlias = Callable[..., PanelProduct]
"""Makes the product of a weight [out, in], as numbers or codes, and a bias. A `gated` one applies its
gate."""


class PackedExperts(nn.Module):
    """Computes the same as transformers' module of these experts, with kernels of the project."""

    def __init__(self, experts: Any, make: Make, workers: WorkerPool) -> None:
        """Pack the experts of a module that `is_stacked`, and release the module's own weights."""
        super().__init__()
        self._workers = workers
        self._opened, self._gate = opens_by_silu(experts), experts._apply_gate
        kind = kind_of(weights_of(experts, DOWN).dtype)
        self._up = _products(experts, GATE_UP, make, gated=self._opened)
        self._down = _products(experts, DOWN, make, gated=False)
        for name, _ in list(experts.named_parameters()):
            setattr(experts, name, None)
        from outrider.engine.cpu.kernels.experts import expert_sum

        self._sum = expert_sum(kind)

    @property
    def ordered(self) -> bool:
        """True where a row's bits do not depend on the others."""
        return self._opened

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [M, C], the experts [M, K] int64 of each row, and their shares [M, K] -> [M, C]."""
        rows, count = chosen.shape
        ids, order = chosen.flatten().sort(stable=True)
        groups, members = _groups(ids.tolist()), self._workers.size(rows)
        opened = multiply_groups(self._up, groups, x.index_select(0, order // count), members)
        opened = opened if self._opened else self._gate(opened)
        given = multiply_groups(self._down, groups, opened, members)
        pairs = torch.empty_like(given).index_copy_(0, order, given)
        weights, result = shares.float().contiguous(), given.new_empty(rows, given.shape[1])
        at = pairs.data_ptr(), weights.data_ptr(), result.data_ptr()
        self._sum(*at, result.shape[1], count, rows)
        return result


def _products(experts: Any, name: str, make: Make, *, gated: bool) -> list[PanelProduct]:
    codes, bias = codes_of_experts(experts, name), bias_of(experts, name)
    weights = alike(codes) if codes else weights_of(experts, name)
    biases = [None] * len(weights) if bias is None else bias
    return [make(weight, added, gated=gated) for weight, added in zip(weights, biases, strict=True)]


def _groups(ids: Sequence[int]) -> list[Group]:
    """Return where each expert's pairs are in the sorted list of experts."""
    starts = [place for place, one in enumerate(ids) if place == 0 or one != ids[place - 1]]
    return [(ids[start], start, stop) for start, stop in pairwise([*starts, len(ids)])]
