"""Products with weights of 4 or 8 bits on matrix tiles, by the kernel of
`outrider.engine.cpu.kernels.quantized_tile_matmul`; importing this module needs AMX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engine.cpu.kernels import tiles
from outrider.engine.cpu.kernels.codes import Codes
from outrider.engine.cpu.kernels.quantized_tile_matmul import MAX_ROWS, quantized_tile_matmul, scratch_bytes
from outrider.engine.cpu.quantized_matmul import QuantizedMatmul
from outrider.engine.cpu.tile_matmul import shape_of


class QuantizedTileMatmul(QuantizedMatmul):
    """See `QuantizedMatmul`; takes bfloat16."""

    pass_rows, max_rows, shared_rows = 2 * tiles.ROWS, MAX_ROWS, MAX_ROWS
    strip = 1

    def _kernel_for(self, codes: Codes, _kind: str, scales: str, locality: int) -> Callable[..., None]:
        return quantized_tile_matmul(codes.kind, scales, int(codes.zeros), locality)

    def _scratch_bytes(self) -> int:
        return scratch_bytes(self._group)

    def _own_numbers(self, rows: int) -> Sequence[int]:
        return self._groups, self._group_words, *shape_of(rows), *self._scratch
