"""Launches the product with coded weights. Importing this imports Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.gpu.accelerator import multiprocessors
from outrider.engine.gpu.kernels.coded_product import coded_product_kernel
from outrider.engine.gpu.shapes import check_rows, check_shape
from outrider.engine.quantization.planes import PlanarWeight

PROGRAMS = 2
"""Wanted programs of a launch per multiprocessor: each waits for memory most of the time."""


class Tile(NamedTuple):
    """The tile that one program computes, and its resources."""

    rows: int
    columns: int
    warps: int
    stages: int
    """Blocks of words that are loaded at once; each has 4 KiB per 32 columns."""


def tile_of(rows: int, columns: int, programs: int) -> Tile:
    """Return a tile with as many columns as still leave work for `programs` programs. Unmeasured.

    It has at most 32 rows, though 64 would decode each code half as often: their sums and the codes do not
    fit into the registers together, and newer devices would use another instruction, perhaps with other bits.
    """
    high = 16 if rows <= 16 else 32
    tiles = -(-rows // high)
    wide = next((size for size in (128, 64) if -(-columns // size) * tiles >= programs), 32)
    return Tile(high, wide, 8 if wide == 128 else 4, 4 if high == 16 and wide < 128 else 3)


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
    tile = tile_of(rows, columns, PROGRAMS * multiprocessors(x.device))
    coded_product_kernel[(-(-rows // tile.rows), -(-columns // tile.columns))](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        out,
        rows,
        columns,
        numbers,
        weight.group,
        x.stride(0),
        weight.words.stride(0),
        weight.scales.stride(0),
        BITS=weight.bits,
        E4M3=weight.e4m3,
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
