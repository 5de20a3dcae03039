"""Launches the product with coded weights. Importing this imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.gpu.accelerator import multiprocessors
from outrider.engine.gpu.kernels.coded_product import coded_product_kernel, sum_parts_kernel
from outrider.engine.gpu.shapes import check_rows, check_shape
from outrider.engine.quantization.planes import PLANE, PlanarWeight
from outrider.engine.quantization.weight import WORD_BITS

COLUMNS = 64
"""Columns of a tile."""
PROGRAMS = 2
"""Wanted programs of a launch per multiprocessor: each waits for memory most of the time."""
MAX_PARTS, MIN_NUMBERS = 8, 512
"""Most parts of a row's sums, and fewest numbers of a part: parts are written, read and added up."""
STAGES = 3
"""Blocks of words that a program loads at once."""
SUMMED = 1024
"""Columns of which a program adds up the parts."""


def tile_rows(rows: int) -> int:
    """Return the rows of a tile: at most 32, though 64 would decode each code half as often. Their sums and
    the codes do not fit into the registers together, and newer devices would use another instruction, perhaps
    with other bits.
    """
    return 16 if rows <= 16 else 32


def parts_of(columns: int, numbers: int, programs: int) -> int:
    """Return into how many parts the sums of a row are divided, so that there are `programs` programs. That
    cannot depend on the rows, because the bits of the sums depend on it.
    """
    parts = 1
    while -(-columns // COLUMNS) * parts < programs and parts < min(MAX_PARTS, numbers // MIN_NUMBERS):
        parts *= 2
    return parts


def coded_product(x: Tensor, weight: PlanarWeight, bias: Tensor | None) -> Tensor:
    """Return x [M, in] of 16 bits (or float32, which is slow) times the weight, plus bias [out]: [M, out] of
    the same dtype. Sums are float32; a row's sums do not depend on the other rows.

    Raises:
        ValueError: x or the bias has another shape.
    """
    rows, (columns, numbers) = len(x), weight.shape
    check_rows("x", x, rows, numbers)
    if bias is not None:
        check_shape("bias", bias, columns)
    out = x.new_empty((rows, columns))
    height = tile_rows(rows)
    parts = parts_of(columns, numbers, PROGRAMS * multiprocessors(x.device))
    target = out if parts == 1 else x.new_empty((parts, rows, columns), dtype=torch.float32)
    coded_product_kernel[(-(-rows // height), -(-columns // COLUMNS), parts)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        target,
        rows,
        columns,
        numbers,
        x.stride(0),
        weight.words.stride(0),
        weight.scales.stride(0),
        GROUP=weight.group,
        WHOLE=numbers % (PLANE * (WORD_BITS // weight.bits)) == 0,
        BITS=weight.bits,
        E4M3=weight.e4m3,
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None and parts == 1,
        BLOCK_M=height,
        BLOCK_N=COLUMNS,
        STAGES=STAGES,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    if parts > 1:
        _sum_parts(target, bias, out)
    return out


def _sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of parts [parts, M, out] float32, plus bias [out], to `out` [M, out]."""
    count, rows, columns = parts.shape
    sum_parts_kernel[(rows, -(-columns // SUMMED))](
        parts,
        out if bias is None else bias,
        out,
        rows,
        columns,
        BIAS=bias is not None,
        PARTS=count,
        BLOCK=SUMMED,
    )
