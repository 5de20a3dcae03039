"""Products with weights of 4 or 8 bits on vectors, by the kernel of
`outrider.engine.cpu.kernels.quantized_matmul`. Importing this imports numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outrider.engine.cpu.backend import kind_of
from outrider.engine.cpu.kernels.codes import E4M3, INT4, INT8, Codes
from outrider.engine.cpu.kernels.prepared_rows import prepare_rows
from outrider.engine.cpu.kernels.quantized_matmul import (
    GROUP,
    MAX_ROWS,
    STRIP,
    SUMS_BYTES,
    quantized_matmul,
    stand_apart,
)
from outrider.engine.cpu.kernels.vectors import BYTES
from outrider.engine.cpu.matmul import PanelProduct, padded
from outrider.engine.cpu.panels import PANEL, aligned
from outrider.engine.cpu.processor import HAS_BF16, LANES, features
from outrider.engine.cpu.recording import launch
from outrider.engine.cpu.row_matmul import locality
from outrider.engine.cpu.strips import columns, in_short_groups, in_strips, with_signs
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.quantization.weight import WORD_BITS, QuantizedWeight


class QuantizedMatmul(PanelProduct):
    """`x @ weight.T + bias`, and with `gated` SiLU(gate) up of its two halves; see `Matmul`.

    Rows are of `dtype`: bfloat16, float16 or float32.
    """

    pass_rows, max_rows, shared_rows = GROUP, MAX_ROWS, 4 * GROUP
    strip: ClassVar[int] = STRIP
    """Panels of a strip."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        workers: WorkerPool,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        passing: bool = False,
    ) -> None:
        numbers = multiplied_as(weight, dtype)
        bfloat16 = numbers == "bfloat16"
        weight = in_short_groups(with_signs(weight) if bfloat16 else weight)
        self._group, self._groups = weight.group, weight.scales.shape[1]
        self._group_words = weight.group * weight.bits // WORD_BITS
        out, width = weight.shape
        super().__init__(
            in_strips(weight, self.strip, stand_apart, gated=gated, numbers=numbers),
            None if bias is None else aligned(columns(bias.float(), self.strip, gated=gated)).flatten(),
            workers,
            (out, width),
            gated=gated,
            panel_columns=(PANEL // 2 if gated else PANEL) * self.strip,
            itemsize=dtype.itemsize,
        )
        self._whole = bfloat16 and weight.zeros is None and width == self._groups * self._group
        codes = Codes(_code(weight), weight.zeros is not None, numbers)
        self._row_bytes = self._groups * (BYTES[numbers] * self._group + codes.share_bytes)
        self._row_bytes += -self._row_bytes % 64
        kind, scales = map(kind_of, (dtype, weight.scales.dtype))
        self._prepare = prepare_rows(kind, numbers)
        self._kernel = self._kernel_for(codes, kind, scales, locality(passing))
        self._factors = aligned(_factors(weight) if numbers == "float32" else torch.ones(LANES))
        self._scratch = workers.room(self._scratch_bytes())

    def _kernel_for(self, codes: Codes, kind: str, scales: str, locality: int) -> Callable[..., None]:
        return quantized_matmul(kind, codes.kind, codes.numbers, scales, int(codes.zeros), locality)

    def _scratch_bytes(self) -> int:
        return SUMS_BYTES

    def _prepared(self, rows: Tensor) -> Tensor:
        if self._whole:
            return padded(rows)
        made = torch.empty(len(rows), self._row_bytes, dtype=torch.uint8)
        numbers = (
            *(rows.data_ptr(), self.numbers, len(rows), self._group, self._groups),
            *(self._factors.data_ptr(), made.data_ptr(), self._row_bytes),
        )
        launch(self._prepare, *numbers)
        return made

    def _own_numbers(self, _rows: int) -> Sequence[int]:
        return self._groups, self._group_words, *self._scratch


def multiplied_as(weight: QuantizedWeight, dtype: torch.dtype) -> str:
    """The kind of numbers that codes are multiplied as; see `Codes`."""
    if multiplies_pairs(dtype):
        return "bfloat16"
    return "float32" if weight.e4m3 or dtype == torch.float32 else "int16"


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """True where codes are multiplied as bfloat16 numbers."""
    return dtype == torch.bfloat16 and HAS_BF16 and "avx512vbmi" in features()


def _code(weight: QuantizedWeight) -> str:
    if weight.e4m3:
        return E4M3
    return INT4 if weight.bits == 4 else INT8


def _factors(weight: QuantizedWeight) -> Tensor:
    """[LANES] float32: the factors that undo the scale of a code's place in its word, or of its float16
    number."""
    if weight.e4m3:
        return torch.full((LANES,), 2.0**8)
    count = WORD_BITS // weight.bits
    exponents = torch.arange(LANES) % count
    return torch.where(exponents == count - 1, 1.0, 2.0 ** (-weight.bits * exponents.float()))
