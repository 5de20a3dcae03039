"""Mixtures of experts on the CPU: each chosen expert is multiplied like a linear layer, with only its own
rows.

So a step reads each expert that its rows chose once, and a row's bits do not depend on its batch.

Shapes: M rows, K experts per row, S = M K pairs of a row and one of its experts, E experts, C hidden width,
F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn

from outrider.engine.cpu.backend import kind_of
from outrider.engine.cpu.matmul import PanelProduct, StackedProducts
from outrider.engine.cpu.recording import launch, with_break
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
        from outrider.engine.cpu.kernels.experts import expert_sum, sort_pairs

        super().__init__()
        self._workers = workers
        self._opened, self._gate = opens_by_silu(experts), with_break(experts._apply_gate)
        kind = kind_of(weights_of(experts, DOWN).dtype)
        self._sort, self._sum = sort_pairs, expert_sum(kind)
        self._count = len(weights_of(experts, DOWN))
        self._up = _products(experts, GATE_UP, make, gated=self._opened)
        self._down = _products(experts, DOWN, make, gated=False)
        for name, _ in list(experts.named_parameters()):
            setattr(experts, name, None)

    @property
    def ordered(self) -> bool:
        """True where a row's bits do not depend on the others."""
        return self._opened

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [M, C], the experts [M, K] int64 of each row, and their shares [M, K] -> [M, C]."""
        (rows, count), members = chosen.shape, self._workers.size(len(x))
        places, sources, ends = self._sorted(chosen.contiguous())
        opened = self._up(x.index_select(0, sources), ends, members)
        given = self._down(opened if self._opened else self._gate(opened), ends, members)
        weights, result = shares.float().contiguous(), given.new_empty(rows, given.shape[1])
        at = given.data_ptr(), places.data_ptr(), weights.data_ptr(), result.data_ptr()
        launch(self._sum, *at, result.shape[1], count, rows)
        return result

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort pairs by expert: the place [S] of each pair, the row [S] of each place, the end [E] of each
        expert's places."""
        pairs, count = chosen.numel(), chosen.shape[1]
        places, sources, ends = (chosen.new_empty(size) for size in (pairs, pairs, self._count))
        at = places.data_ptr(), sources.data_ptr(), ends.data_ptr()
        launch(self._sort, chosen.data_ptr(), pairs, count, self._count, *at)
        return places, sources, ends


def _products(experts: Any, name: str, make: Make, *, gated: bool) -> StackedProducts:
    codes, bias = codes_of_experts(experts, name), bias_of(experts, name)
    weights = alike(codes) if codes else weights_of(experts, name)
    biases = [None] * len(weights) if bias is None else bias
    pairs = zip(weights, biases, strict=True)
    return StackedProducts([make(weight, added, gated=gated) for weight, added in pairs])
