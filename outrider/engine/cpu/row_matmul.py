"""Products with the kernel of `outrider.engine.cpu.kernels.row_matmul`. Importing this imports numba."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from llvmlite import binding
from torch import Tensor

from outrider.engine.cpu.backend import kind_of
from outrider.engine.cpu.kernels.row_matmul import GROUP, MAX_ROWS, SUMS_BYTES, row_matmul, rows_kind
from outrider.engine.cpu.layer import converted
from outrider.engine.cpu.matmul import Matmul, padded
from outrider.engine.cpu.worker_pool import WorkerPool

_PAST_SHARED_CACHE, _INTO_ALL_CACHES = 0, 3
"""The localities of a prefetch that are used here."""


class RowMatmul(Matmul):
    """See `Matmul`; takes bfloat16, float16 or float32."""

    pass_rows, max_rows, shared_rows, multiple = GROUP, MAX_ROWS, 4 * GROUP, 1

    def __init__(self, weight: Tensor, bias: Tensor | None, workers: WorkerPool, **options: bool) -> None:
        super().__init__(weight, bias, workers, **options)
        kind = kind_of(weight.dtype)
        self._rows_dtype: torch.dtype = getattr(torch, rows_kind(kind))
        self._kernel = row_matmul(kind, locality(self._passing))
        self._sums = workers.room(SUMS_BYTES)

    def _prepared(self, rows: Tensor) -> Tensor:
        return padded(converted(rows, self._rows_dtype))

    def _own_numbers(self, _rows: int) -> Sequence[int]:
        return self._steps, *self._sums


def locality(passing: bool) -> int:
    """How weights are prefetched; see `Matmul` for `passing`."""
    # Zen 5 reads weights past the shared cache at the same speed, which leaves the cache to others. A Xeon
    # reads them so at half the speed.
    past = passing and binding.get_host_cpu_name().startswith("znver")
    return _PAST_SHARED_CACHE if past else _INTO_ALL_CACHES
