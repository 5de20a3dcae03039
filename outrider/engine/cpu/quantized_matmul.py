"""Products with weights of 4 or 8 bits, by the kernel of `outrider.engine.cpu.kernels.quantized_matmul`.
Importing this imports numba."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.cpu.kernels.quantized_matmul import (
    GROUP,
    MAX_ROWS,
    STRIP,
    SUMS_BYTES,
    prepare_rows,
    quantized_matmul,
)
from outrider.engine.cpu.matmul import PanelProduct, Panels
from outrider.engine.cpu.panels import PANEL, aligned, paired
from outrider.engine.cpu.processor import LANES
from outrider.engine.cpu.row_matmul import locality
from outrider.engine.cpu.worker_pool import WorkerPool
from outrider.engine.quantization.weight import WORD_BITS, QuantizedWeight


class QuantizedMatmul(PanelProduct):
    """`x @ weight.T + bias`, and with `gated` SiLU(gate) up of its two halves; see `Matmul`.

    Rows are of `dtype`, bfloat16 or float32.
    """

    pass_rows, max_rows, shared_rows = GROUP, MAX_ROWS, 4 * GROUP

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
        self._group = weight.group
        self._groups, self._per_word = weight.scales.shape[1], WORD_BITS // weight.bits
        out, numbers = weight.shape
        width = (PANEL // 2 if gated else PANEL) * STRIP
        held = Panels(
            _in_strips(weight, gated),
            None if bias is None else aligned(_columns(bias.float(), gated)).flatten(),
            *(numbers, out // 2 if gated else out, width, dtype.itemsize),
        )
        super().__init__(held, workers, gated=gated)
        self._row_bytes = 4 * self._groups * (self._group + 1)
        self._row_bytes += -self._row_bytes % 64
        kind, scales = (str(part).removeprefix("torch.") for part in (dtype, weight.scales.dtype))
        self._prepare = prepare_rows(kind)
        self._kernel = quantized_matmul(
            kind, weight.bits, scales, int(weight.zeros is not None), locality(passing)
        )
        self._factors = _factors(weight.bits)
        self._sums = workers.room(SUMS_BYTES)

    def _prepared(self, rows: Tensor) -> Tensor:
        made = torch.empty(len(rows), self._row_bytes, dtype=torch.uint8)
        self._prepare(
            *(rows.data_ptr(), self._numbers, len(rows), self._group, self._groups),
            *(self._factors.data_ptr(), made.data_ptr(), self._row_bytes),
        )
        return made

    def _multiply(
        self,
        member: int,
        x: int,
        x_stride: int,
        w: int,
        panels: int,
        bias: int,
        y: int,
        y_stride: int,
        columns: int,
        rows: int,
    ) -> None:
        words, sums = self._group // self._per_word, self._sums[member]
        self._kernel(
            *(x, x_stride, w, self._groups, words, panels, bias, y, y_stride, columns, rows),
            *(self._gated, sums),
        )


def _in_strips(weight: QuantizedWeight, gated: bool) -> Tensor:
    """[strips, groups, bytes] uint8: [STRIP, PANEL] scales, as many zeros if there are any, and the words."""
    groups = weight.scales.shape[1]
    heads = [part for part in (weight.scales, weight.zeros) if part is not None]
    parts = [_columns(part, gated).permute(0, 3, 1, 2) for part in heads]
    parts.append(_columns(weight.words.view(len(weight.words), groups, -1), gated).permute(0, 3, 4, 1, 2))
    return aligned(torch.cat([part.flatten(2).contiguous().view(torch.uint8) for part in parts], 2))


def _columns(values: Tensor, gated: bool) -> Tensor:
    """[out, ...] -> [strips, STRIP, PANEL, ...], zeros behind `out`."""
    if gated:
        values = paired(values)
    behind = (0, 0) * (values.ndim - 1) + (0, -len(values) % (STRIP * PANEL))
    return pad(values, behind).view(-1, STRIP, PANEL, *values.shape[1:])


def _factors(bits: int) -> Tensor:
    """[LANES] float32: what makes up for the place of a code in its word."""
    count = WORD_BITS // bits
    exponents = torch.arange(LANES) % count
    return aligned(torch.where(exponents == count - 1, 1.0, 2.0 ** (-bits * exponents.float())))
