"""Linear layers per head on the CPU. Each head's weight is multiplied like a linear layer, with all rows.

Shapes: N rows, Q heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outrider.engine.cpu.matmul import PanelProduct, StackedProducts
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.linears import HeadLinears


class PackedHeads(nn.Module):
    """Computes the same as `HeadLinears`, with the project's kernels."""

    def __init__(self, heads: HeadLinears, make: Callable[..., PanelProduct], workers: WorkerPool) -> None:
        """`make` creates the product of a weight [out, in] and a bias."""
        super().__init__()
        self._workers = workers
        self._products = StackedProducts([make(weight, None) for weight in heads.weight.detach()])

    def forward(self, x: Tensor) -> Tensor:
        """[N, Q, in] -> [N, Q, out]."""
        count, heads, width = x.shape
        rows = x.transpose(0, 1).reshape(-1, width)
        ends = torch.arange(1, heads + 1) * count
        made = self._products(rows.contiguous(), ends, self._workers.size(count))
        return made.view(heads, count, made.shape[1]).transpose(0, 1)
