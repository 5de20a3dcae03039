"""Which kernels compute a model's products on this processor.

    amx        matrix tiles (Intel from Sapphire Rapids on), bfloat16
    avx512     AVX-512, bfloat16 (fewer instructions with AVX-512 BF16), float16 and float32
    avx2       AVX2 with FMA, on processors without AVX-512, the same dtypes
    onednn     the library oneDNN, for everything else

All but the last compute the same bits for a row in every batch. The bits differ between back ends: a model
runs on one of them.
"""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from outrider.engine.cpu import processor
from outrider.engine.cpu.kernels import compiling
from outrider.protocol.errors import ModelError

if TYPE_CHECKING:
    from outrider.engine.cpu.matmul import Matmul
    from outrider.engine.cpu.quantized_matmul import QuantizedMatmul

AUTO = "auto"


class Backend(StrEnum):
    """The back ends, with the names that settings use."""

    AMX = "amx"
    AVX512 = "avx512"
    AVX2 = "avx2"
    ONEDNN = "onednn"


_FEATURES = {
    (Backend.AMX, torch.bfloat16): (*processor.AVX512, "avx512vbmi", "avx512bf16", "amx-tile", "amx-bf16"),
    (Backend.AVX512, torch.bfloat16): processor.AVX512,
    (Backend.AVX512, torch.float16): processor.AVX512,
    (Backend.AVX512, torch.float32): processor.AVX512,
    (Backend.AVX2, torch.bfloat16): processor.AVX2,
    (Backend.AVX2, torch.float16): (*processor.AVX2, "f16c"),
    (Backend.AVX2, torch.float32): processor.AVX2,
}
"""The processor features that a back end needs for a dtype, with LLVM's names."""


def unsupported_reason(backend: Backend, dtype: torch.dtype) -> str | None:
    """Why a back end cannot compute a dtype here; None when it can."""
    if backend is Backend.ONEDNN:
        return None
    wanted = _FEATURES.get((backend, dtype))
    if wanted is None:
        return f"it does not compute {dtype}"
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    missing = [feature for feature in wanted if feature not in processor.features()]
    if missing:
        return f"the processor has no {', '.join(missing)}"
    if not compiling.available():
        return "the package numba cannot be imported (the log says why)"
    if backend is Backend.AVX2 and processor.features().issuperset(processor.AVX512):
        return "the kernels use this processor's AVX-512"
    if backend is Backend.AMX and not _tiles_allowed():
        return "the system refuses the use of tiles (arch_prctl)"
    return None


def preferred(dtype: torch.dtype, wanted: str = AUTO) -> Backend:
    """Return the back end that was asked for, or the first of the list above that can run.

    Raises:
        ModelError: the back end that was asked for cannot run here.
    """
    if wanted == AUTO:
        return next(backend for backend in Backend if unsupported_reason(backend, dtype) is None)
    reason = unsupported_reason(backend := Backend(wanted), dtype)
    if reason is not None:
        raise ModelError(f"cpu_backend: {wanted} cannot run here: {reason}; set cpu_backend to auto")
    return backend


def matmul_type(backend: Backend) -> type[Matmul] | None:
    """Return what computes a layer with one of the project's back ends, compiled if needed; None for the
    library."""
    match backend:
        case Backend.AMX:
            from outrider.engine.cpu.tile_matmul import TileMatmul

            return TileMatmul
        case Backend.AVX512 | Backend.AVX2:
            from outrider.engine.cpu.row_matmul import RowMatmul

            return RowMatmul
        case Backend.ONEDNN:
            return None


def codes_backend(backend: Backend, dtype: torch.dtype) -> Backend:
    """The back end that multiplies codes in a model on `backend`, with rows of a dtype: the same one, or the
    first that can. The library cannot: ONEDNN stands for none."""
    can = backend is not Backend.ONEDNN and unsupported_reason(backend, dtype) is None
    return backend if can else preferred(dtype)


def quantized_type(backend: Backend, dtype: torch.dtype) -> type[QuantizedMatmul]:
    """Return what multiplies codes in a model on `backend`, with rows of a dtype that a back end takes."""
    if codes_backend(backend, dtype) is Backend.AMX:
        from outrider.engine.cpu.quantized_tile_matmul import QuantizedTileMatmul

        return QuantizedTileMatmul
    from outrider.engine.cpu.quantized_matmul import QuantizedMatmul

    return QuantizedMatmul


def kernels_name(backend: Backend, dtype: torch.dtype) -> str:
    """The name of the kernels that a back end runs here: with AVX-512 but without BF16, other ones compute
    bfloat16."""
    other = backend is Backend.AVX512 and dtype == torch.bfloat16 and not processor.HAS_BF16
    return f"{backend} without bf16" if other else backend


def kind_of(dtype: torch.dtype) -> str:
    """The name that kernels have for a dtype."""
    return str(dtype).removeprefix("torch.")


def vector_backend(dtype: torch.dtype) -> Backend | None:
    """The back end whose vectors the kernels for this dtype use here; None: there is none."""
    for backend in (Backend.AVX512, Backend.AVX2):
        if unsupported_reason(backend, dtype) is None:
            return backend
    return None


def _tiles_allowed() -> bool:
    from outrider.engine.cpu.kernels import tiles

    return tiles.allowed()
