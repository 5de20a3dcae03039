"""Functions of vectors as kernels of their own. Importing this compiles them: it takes numba and AVX-512."""

from __future__ import annotations

from outrider.engine.cpu.kernels import epilogue
from outrider.engine.cpu.kernels.compiling import kernel
from outrider.engine.cpu.kernels.vectors import LANES, load_aligned, store_aligned


@kernel("void(intp, intp, intp)")
def exponential(x: int, y: int, count: int) -> None:
    """e^x of `count` float32 numbers, a multiple of LANES, at addresses that are multiples of 64."""
    for at in range(0, 4 * count, 4 * LANES):
        store_aligned(y + at, epilogue.exponential(load_aligned(x + at)))


@kernel("void(intp, intp, intp)")
def silu(x: int, y: int, count: int) -> None:
    """The same for x / (1 + e^-x)."""
    for at in range(0, 4 * count, 4 * LANES):
        store_aligned(y + at, epilogue.silu(load_aligned(x + at)))
