"""Compiles the kernels of `rows_ir` for this processor and calls them with tensors."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from outrider.engine.kernels.crew import Crew
from outrider.engine.kernels.rows_ir import (
    BFLOAT16,
    FLOAT32,
    LANES,
    MAX_ROWS,
    PANEL,
    PANEL_STEP_BYTES,
    STEP_BYTES,
    VECTORS,
    Numbers,
    module,
)

NUMBERS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
FEATURES = {torch.bfloat16: ("avx512f", "avx512bw", "avx512bf16"), torch.float32: ("avx512f",)}
"""What the processor must have, in LLVM's names."""
MOST_ROWS = 4 * MAX_ROWS
"""Rows of one pass over the weights; more take several."""
LEAST_SHARE = 2**20
"""Bytes of weights that are worth handing to another thread."""
SHARES = 6
"""Into which the panels are cut for each thread."""
_ALIGNMENT = 64
_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    ctypes.c_void_p,
)


class PackedRows:
    """The weights of one linear layer as the kernel reads them.

    `weight` [out, in] and `bias` [out] or None, of a dtype that `available` names; `in` times the size of a
    number must be a multiple of 4 bytes. Products are shared by the crew.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, crew: Crew) -> None:
        self._crew = crew
        self._columns, width = weight.shape
        self._numbers = NUMBERS[weight.dtype]
        self._steps = width * self._numbers.bytes // STEP_BYTES
        self._panels = -(-self._columns // PANEL)
        self._weight = _aligned(_panels(weight, self._panels, self._numbers))
        self._bias = None if bias is None else _padded(bias.float(), self._panels * PANEL)
        self._product = _compiled(weight.dtype)
        self._sums = _aligned(torch.zeros(crew.largest, MOST_ROWS * PANEL))

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, in] contiguous -> [R, out], R >= 0. Not for several threads at once."""
        result = rows.new_empty(rows.shape[0], self._columns)
        size = min(self._crew.size(rows.shape[0]), max(1, self._weight.nbytes // LEAST_SHARE))
        shares = self._shares(1 if size == 1 else size * SHARES)

        def work(member: int, share: tuple[int, int]) -> None:
            for start in range(0, rows.shape[0], MOST_ROWS):
                end = start + MOST_ROWS
                self._multiply(member, share, rows[start:end], result[start:end])

        self._crew.share(size, shares, work)
        return result

    def _shares(self, count: int) -> list[tuple[int, int]]:
        """Panels [first, end) of each share; none is empty."""
        count = min(count, self._panels)
        return list(pairwise(self._panels * share // count for share in range(count + 1)))

    def _multiply(
        self, member: int, share: tuple[int, int], rows: torch.Tensor, result: torch.Tensor
    ) -> None:
        first, end = share
        column, size = first * PANEL, self._numbers.bytes
        self._product(
            rows.data_ptr(),
            STEP_BYTES * self._steps,
            self._weight.data_ptr() + first * self._steps * PANEL_STEP_BYTES,
            self._steps,
            end - first,
            None if self._bias is None else self._bias.data_ptr() + 4 * column,
            result.data_ptr() + size * column,
            size * self._columns,
            size,
            self._columns - column,
            rows.shape[0],
            -(-rows.shape[0] // MAX_ROWS),
            self._sums[member].data_ptr(),
        )


@cache
def available(dtype: torch.dtype) -> bool:
    """True when this processor and this installation can run the kernels for a dtype."""
    if platform.machine() not in ("x86_64", "AMD64") or importlib.util.find_spec("llvmlite") is None:
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return dtype in NUMBERS and all(features.get(feature) for feature in FEATURES[dtype])


def fits(weight: torch.Tensor) -> bool:
    """True when the kernels take a weight [out, in]."""
    if weight.device.type != "cpu" or not available(weight.dtype):
        return False
    return weight.shape[1] * NUMBERS[weight.dtype].bytes % STEP_BYTES == 0


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    """The function `product` for a dtype."""
    engine = _engine(module(NUMBERS[dtype]))
    address = engine.get_function_address("product")
    call = ctypes.CFUNCTYPE(None, *_ARGUMENTS)(address)
    call.engine = engine  # type: ignore[attr-defined]  # the code lives as long as its engine
    return call


def _engine(text: str) -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    parsed = binding.parse_assembly(text)
    parsed.verify()
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


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
