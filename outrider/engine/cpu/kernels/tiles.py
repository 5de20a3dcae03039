"""The processor's matrix tiles (Intel AMX): their instructions, and the system's permission to use them.

A tile is a register of up to 16 rows of 64 bytes. Its number is part of an instruction, so it has to be
known when the kernel is compiled. (Intel 64 and IA-32 Architectures Software Developer's Manual, chapter
"Programming with Intel AMX".)
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from outrider.engine.cpu.kernels.vectors import (
    I8,
    I16,
    I32,
    I64,
    VOID,
    Address,
    Builder,
    Value,
    below,
    call,
    emits,
    pointer,
)

ROWS = 16
ROW_BYTES = 64
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Numbers of Linux on x86-64: the system call, its request, and what is requested."""
_FLUSH = 0x8040
"""Bits of the register MXCSR: make no denormal numbers, and take those that are given for 0."""


@cache
def allowed() -> bool:
    """True when Linux lets this process use tiles; without asking, the first instruction ends the process.

    The answer holds for all threads and for forked children. Old kernels and seccomp filters refuse.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    system = ctypes.CDLL(None, use_errno=True)
    return bool(system.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def configurations() -> np.ndarray:
    """[ROWS + 1, 64] uint8: row h is what `configure` takes so that tiles 0 to 5 have h rows, 6 and 7 all
    ROWS."""
    palette, widths = 1, [ROW_BYTES] * 8 + [0] * 8
    rows = [
        struct.pack("<16B16H16B", palette, *[0] * 15, *widths, *[height] * 6, *[ROWS] * 2, *[0] * 8)
        for height in range(ROWS + 1)
    ]
    return np.frombuffer(bytearray(b"".join(rows)), np.uint8).reshape(ROWS + 1, 64)


@emits(types.void, Address)
def configure(builder: Builder, address: Value) -> None:
    """Give the tiles the shapes that 64 bytes describe."""
    call(builder, "llvm.x86.ldtilecfg", VOID, pointer(builder, address))


@emits(types.void)
def release(builder: Builder) -> None:
    """Give the tiles back."""
    call(builder, "llvm.x86.tilerelease", VOID)


@emits(types.void, literals=1)
def zero(builder: Builder, tile: int) -> None:
    """Set a tile to 0."""
    call(builder, "llvm.x86.tilezero", VOID, I8(tile))


@emits(types.void, Address, Address, literals=1)
def load_tile(builder: Builder, tile: int, address: Value, stride: Value) -> None:
    """Read a tile whose rows are `stride` bytes apart."""
    call(builder, "llvm.x86.tileloadd64", VOID, I8(tile), pointer(builder, address), stride)


@emits(types.void, Address, Address, literals=1)
def store_tile(builder: Builder, tile: int, address: Value, stride: Value) -> None:
    """Write a tile whose rows are `stride` bytes apart."""
    call(builder, "llvm.x86.tilestored64", VOID, I8(tile), pointer(builder, address), stride)


@emits(types.void, literals=3)
def multiply_tiles(builder: Builder, sums: int, rows: int, weights: int) -> None:
    """Add to the float32 tile `sums` [r, 16] the product of bfloat16 `rows` [r, 32] and `weights` [32, 16].

    The instruction TDPBF16PS: for a row and a column the even terms are a chain of fused multiply-adds from
    0, the odd terms another; the sum of both is added to `sums`. Denormal numbers count as 0.
    """
    call(builder, "llvm.x86.tdpbf16ps", VOID, I8(sums), I8(rows), I8(weights))


@emits(types.intp)
def flush_denormals(builder: Builder) -> Value:
    """Let vectors take denormal numbers for 0 and make none, as tiles do; return the thread's mode before."""
    place = cgutils.alloca_once(builder, I32)
    call(builder, "llvm.x86.sse.stmxcsr", VOID, place)
    before = builder.load(place)
    _set_mode(builder, builder.or_(before, I32(_FLUSH)))
    return builder.zext(before, I64)


@emits(types.void, Address)
def set_mode(builder: Builder, mode: Value) -> None:
    """Set the mode of a thread that `flush_denormals` returned."""
    _set_mode(builder, builder.trunc(mode, I32))


def _set_mode(builder: Builder, mode: Value) -> None:
    place = cgutils.alloca_once(builder, I32)
    builder.store(mode, place)
    call(builder, "llvm.x86.sse.ldmxcsr", VOID, place)


@emits(types.void, Address, Address, Address)
def copy_start(builder: Builder, target: Value, source: Value, count: Value) -> None:
    """Copy the first `count` of 32 numbers of 16 bits, and write 0 for the others."""
    lanes = ir.VectorType(I16, 32)
    mask = below(builder, count, 32)
    zeros = ir.Constant(lanes, None)
    found = call(builder, "llvm.masked.load.v32i16.p0", lanes, pointer(builder, source), I32(2), mask, zeros)
    builder.store(found, pointer(builder, target), align=2)
