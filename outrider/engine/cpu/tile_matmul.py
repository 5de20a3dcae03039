"""Products with the kernel of `outrider.engine.cpu.kernels.tile_matmul`; importing this module compiles the
kernel, and needs AMX."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cpu.kernels import tiles
from outrider.engine.cpu.kernels.tile_matmul import CHUNK, MAX_ROWS, NUMBERS, TILE_STEPS, tile_matmul
from outrider.engine.cpu.matmul import Matmul
from outrider.engine.cpu.panels import STRIDE, aligned
from outrider.engine.cpu.worker_pool import WorkerPool

assert tiles.allowed(), "without the system's permission the first tile would end the process"
_CONFIGURATIONS = aligned(torch.from_numpy(tiles.configurations()))


class TileMatmul(Matmul):
    """See `Matmul`; takes bfloat16."""

    pass_rows, max_rows, shared_rows, multiple = 2 * tiles.ROWS, MAX_ROWS, MAX_ROWS, TILE_STEPS

    def __init__(self, weight: Tensor, bias: Tensor | None, workers: WorkerPool, **options: bool) -> None:
        super().__init__(weight, bias, workers, **options)
        self._kernel = tile_matmul
        self._rests = workers.room(2 * MAX_ROWS * NUMBERS)
        self._sums = workers.room(CHUNK * (MAX_ROWS + tiles.ROWS) * STRIDE)

    def _own_numbers(self, rows: int) -> Sequence[int]:
        return self.numbers, *shape_of(rows), *self._rests, *self._sums


def shape_of(rows: int) -> tuple[int, int]:
    """The height of the tiles that rows are cut into, as few and as equal as possible, and the address of the
    configuration for it."""
    height = -(-rows // -(-rows // tiles.ROWS))
    return height, _CONFIGURATIONS[height].data_ptr()
