"""Compiles the kernels of `rows_ir` for this processor and calls them with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from outrider.engine.kernels import compiler
from outrider.engine.kernels.crew import Crew
from outrider.engine.kernels.numbers_ir import BFLOAT16, FLOAT32, LANES, STEP_BYTES, Numbers
from outrider.engine.kernels.rows_ir import MAX_ROWS, PANEL, PANEL_STEP_BYTES, VECTORS, module

NUMBERS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
MOST_ROWS = 10 * MAX_ROWS
"""Rows of one pass over the weights; more take several. Those of a block of steps stay in the cache."""
SHARED_ROWS = 4 * MAX_ROWS
"""Rows of a pass where the panels are too few to be shared evenly."""
LEAST_SHARE = 2**20
"""Bytes of weights that are worth handing to another thread."""
SHARES = 24
"""Into which the work is cut for each thread."""
SUMS_BYTES = 4 * MOST_ROWS * PANEL
Part: TypeAlias = tuple[int, int, int, int]
"""Panels [first, end) for rows [start, stop)."""
_ALIGNMENT = 64
_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    ctypes.c_void_p,
)


class PackedRows:
    """The weights of one linear layer as the kernel reads them.

    `weight` [out, in] and `bias` [out] or None, of a dtype that `available` names; `in` times the size of a
    number must be a multiple of 4 bytes. Products are shared by the crew. With `gated` the first half of
    `out` is a gate, the second half up, and the product is SiLU(gate) up. Weights that are not `kept` leave
    the cache that the cores share to others.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        crew: Crew,
        *,
        gated: bool = False,
        kept: bool = True,
    ) -> None:
        self._crew = crew
        self._columns = weight.shape[0] // 2 if gated else weight.shape[0]
        if gated:
            weight, bias = _paired(weight), None if bias is None else _paired(bias)
        self._numbers = NUMBERS[weight.dtype]
        self._steps = weight.shape[1] * self._numbers.bytes // STEP_BYTES
        self._panels = -(-weight.shape[0] // PANEL)
        self._panel_columns = LANES if gated else PANEL
        self._weight = _aligned(_panels(weight, self._panels, self._numbers))
        self._bias = None if bias is None else _padded(bias.float(), self._panels * PANEL)
        self._product = _compiled(weight.dtype, kept, "gated" if gated else "product")
        self._sums = _aligned(torch.zeros(crew.largest, SUMS_BYTES // 4))
        self._row_bytes = STEP_BYTES * self._steps
        self._weight_at, self._sums_at = self._weight.data_ptr(), self._sums.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, in] contiguous -> [R, out or its half], R >= 0. Not for several threads at once."""
        count = rows.shape[0]
        result = rows.new_empty(count, self._columns)
        size = min(self._crew.size(count), max(1, self._weight.nbytes // LEAST_SHARE))
        x, y = rows.data_ptr(), result.data_ptr()
        if size == 1:
            for start, stop in _cut(count, -(-count // MOST_ROWS)):
                self._multiply(0, (0, self._panels, start, stop), x, y)
        else:
            work = partial(self._multiply, x=x, y=y)
            self._crew.share(size, self._parts(size * SHARES, count), work)
        return result

    def _parts(self, wanted: int, rows: int) -> list[Part]:
        """About as many parts as are wanted, or more."""
        most = SHARED_ROWS if self._panels < wanted else MOST_ROWS
        panels, passes = _cut(self._panels, min(wanted, self._panels)), _cut(rows, -(-rows // most))
        return [(*share, *some) for some in passes for share in panels]

    def _multiply(self, member: int, part: Part, x: int, y: int) -> None:
        """Compute a part for the rows at address x into the result at y."""
        first, end, start, stop = part
        column, width = first * self._panel_columns, self._numbers.bytes * self._columns
        self._product(
            x + start * self._row_bytes,
            self._row_bytes,
            self._weight_at + first * self._steps * PANEL_STEP_BYTES,
            self._steps,
            end - first,
            self._bias_at + 4 * first * PANEL if self._bias_at else None,
            y + start * width + self._numbers.bytes * column,
            width,
            self._numbers.bytes,
            self._columns - column,
            stop - start,
            -(-(stop - start) // MAX_ROWS),
            self._sums_at + member * SUMS_BYTES,
        )


@cache
def available(dtype: torch.dtype) -> bool:
    """True when this processor and this installation can run the kernels for a dtype."""
    return compiler.can_run(dtype)


def fits(weight: torch.Tensor) -> bool:
    """True when the kernels take a weight [out, in]."""
    if weight.device.type != "cpu" or not available(weight.dtype):
        return False
    return weight.shape[1] * NUMBERS[weight.dtype].bytes % STEP_BYTES == 0


@cache
def _module(dtype: torch.dtype, kept: bool) -> Any:
    return compiler.engine(module(NUMBERS[dtype], kept))


@cache
def _compiled(dtype: torch.dtype, kept: bool, name: str) -> Callable[..., None]:
    return compiler.function(_module(dtype, kept), name, _ARGUMENTS)


def _cut(whole: int, count: int) -> list[tuple[int, int]]:
    """`count` parts [first, end) of about one size."""
    return list(pairwise(whole * part // max(count, 1) for part in range(count + 1)))


def _paired(values: torch.Tensor) -> torch.Tensor:
    """[2 F, ...] -> [panels * PANEL, ...]: of each panel LANES rows of the first half, then of the second."""
    half, rest = values.shape[0] // 2, values.shape[1:]
    panels = -(-half // LANES)
    paired = values.new_zeros(2, panels * LANES, *rest)
    paired[:, :half] = values.view(2, half, *rest)
    return paired.view(2, panels, LANES, *rest).transpose(0, 1).reshape(panels * PANEL, *rest)


def _panels(weight: torch.Tensor, panels: int, numbers: Numbers) -> torch.Tensor:
    """[out, in] -> [panels, steps, VECTORS, LANES, numbers of a step], columns beyond `out` zero."""
    per_step = STEP_BYTES // numbers.bytes
    padded = torch.nn.functional.pad(weight, (0, 0, 0, panels * PANEL - weight.shape[0]))
    split = padded.view(panels, VECTORS, LANES, -1, per_step)
    return split.permute(0, 3, 1, 2, 4)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[0])).contiguous()


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose storage begins at a multiple of 64 bytes, as torch allocates it."""
    copy = values.clone(memory_format=torch.contiguous_format)
    assert copy.data_ptr() % _ALIGNMENT == 0, "torch aligns its storage to 64 bytes"
    return copy
