"""Gives this process another processor: kernels for AVX-512 and AMX run wherever kernels for AVX2 do.

    EMULATED_PROCESSOR=amx python -m pytest -p tests.emulated_processor tests/unit/engine/cpu/test_matmul.py

The kernels are compiled for the processor that is there; LLVM divides vectors that are too wide for it. Where
a kernel asks for a certain instruction, it calls a function below, which computes what the manual says.
(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.)
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.engine.cpu import processor

_AVX2 = frozenset({*processor.AVX2, "f16c"})
_AVX512 = _AVX2 | {*processor.AVX512}
PROCESSORS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512 | {"avx512vbmi", "avx512bf16"},
    "amx": _AVX512 | {"avx512vbmi", "avx512bf16", "amx-tile", "amx-bf16"},
}
"""Instruction sets of kinds of processors, with LLVM's names."""
_FUNCTIONS: dict[str, Any] = {}
"""By the name of LLVM's intrinsic, what is called instead."""
_generic: list[Any] = []
"""The project's own function that calls an intrinsic."""
_CACHE = tempfile.TemporaryDirectory(prefix="emulated-")
"""Machine code of another processor must not get into this user's cache."""


def emulate(name: str) -> None:
    """Take this processor for one of PROCESSORS. Before any module with kernels is imported."""
    os.environ["XDG_CACHE_HOME"] = _CACHE.name
    found = PROCESSORS[name]
    processor.features = lambda: found  # type: ignore[assignment]
    processor.LANES = 16 if found.issuperset(processor.AVX512) else 8
    processor.HAS_BF16 = "avx512bf16" in found
    from outrider.engine.cpu.kernels import vectors

    _generic.append(vectors.call)
    vectors.call = _call
    vectors.opaque = lambda _builder, value: value
    from outrider.engine.cpu.kernels import tiles

    tiles.allowed = lambda: True  # type: ignore[assignment]


def _call(builder: Any, intrinsic: str, result: Any, *arguments: Any) -> Any:
    """Take the place of `vectors.call`."""
    make = _called if intrinsic in _FUNCTIONS else _generic[0]
    return make(builder, intrinsic, result, *arguments)


def _called(builder: Any, intrinsic: str, result: Any, *arguments: Any) -> Any:
    """Call the function that takes the place of an intrinsic. Vectors, also the result, lie in memory."""
    made = None if isinstance(result, ir.VoidType) else cgutils.alloca_once(builder, result)
    places = [] if made is None else [made]
    for value in arguments:
        in_memory = isinstance(value.type, ir.VectorType)
        places.append(cgutils.alloca_once_value(builder, value) if in_memory else value)
    given = [_as_integer(builder, place) for place in places]
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(given))
    builder.call(cgutils.get_or_insert_function(builder.module, kind, _symbol(intrinsic)), given)
    return None if made is None else builder.load(made, typ=result)


def _as_integer(builder: Any, value: Any) -> Any:
    integer = ir.IntType(64)
    if isinstance(value.type, ir.PointerType):
        return builder.ptrtoint(value, integer)
    return value if value.type == integer else builder.zext(value, integer)


def _symbol(intrinsic: str) -> str:
    return "emulated." + intrinsic


def _instead_of(intrinsic: str, *arguments: Any) -> Callable[[Callable[..., None]], None]:
    """Compile a function, so that kernels find it under a name: the code of kernels is kept in a cache."""

    def define(function: Callable[..., None]) -> None:
        compiled = cfunc(types.void(*arguments))(function)
        binding.add_symbol(_symbol(intrinsic), compiled.address)
        _FUNCTIONS[intrinsic] = compiled

    return define


FLOATS, WORDS, HALVES, BYTES = (  # in memory
    types.CPointer(kind) for kind in (types.float32, types.uint32, types.uint16, types.uint8)
)
INTEGERS, SHORTS = (types.CPointer(kind) for kind in (types.int32, types.int16))
INTEGER = types.intp
_TINY = np.float32(np.finfo(np.float32).tiny)


@intrinsic
def _float(_context: Any, bits: Any) -> Any:
    """The float32 number that has these bits."""

    def bitcast(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.uint32), bitcast


@intrinsic
def _bits(_context: Any, number: Any) -> Any:
    """The bits of a float32 number."""

    def bitcast(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.IntType(32))

    return types.uint32(types.float32), bitcast


@njit
def _normal(number: float) -> float:
    """The number, or 0 if it is denormal."""
    return np.float32(0) if abs(number) < _TINY else number


@njit
def _higher(pair: int) -> float:
    """The bfloat16 number in the higher half of 32 bits."""
    return _normal(_float(np.uint32(pair & 0xFFFF0000)))


@njit
def _lower(pair: int) -> float:
    """The bfloat16 number in the lower half."""
    return _normal(_float(np.uint32(pair << 16)))


@njit
def _fused(a: float, b: float, total: float) -> float:
    """a b + total of bfloat16 numbers a and b, rounded once; products are exact unless they are denormal."""
    product = np.float64(a) * np.float64(b)
    if abs(product) >= _TINY:
        return _normal(np.float32(a) * np.float32(b) + total)
    return _normal(np.float32(product + np.float64(total)))


def _rounded(number: float) -> float:
    """LLVM's name for the rounding to bfloat16 where no instruction does it; the result is the lower half."""
    bits = _bits(number)
    nearest = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return _float(np.uint32(bits >> 16 | 0x40 if np.isnan(number) else nearest))


_ROUNDED = cfunc(types.float32(types.float32))(_rounded)
binding.add_symbol("__truncsfbf2", _ROUNDED.address)


@_instead_of("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, FLOATS, WORDS, WORDS)
def _vdpbf16ps(result: Any, total: Any, weights: Any, numbers: Any) -> None:
    for lane in range(16):
        a, b = weights[lane], numbers[lane]
        first = _fused(_higher(a), _higher(b), _normal(total[lane]))
        result[lane] = _fused(_lower(a), _lower(b), first)


@_instead_of("llvm.x86.avx512.mask.scalef.ps.512", FLOATS, FLOATS, FLOATS, FLOATS, INTEGER, INTEGER)
def _vscalefps(result: Any, x: Any, exponent: Any, _kept: Any, _mask: int, _rounding: int) -> None:
    for lane in range(16):
        result[lane] = np.float32(np.float64(x[lane]) * np.float64(2.0) ** np.floor(exponent[lane]))


@_instead_of("llvm.x86.avx512.pmaddw.d.512", INTEGERS, SHORTS, SHORTS)
def _vpmaddwd(result: Any, first: Any, second: Any) -> None:
    for lane in range(16):
        low, high = 2 * lane, 2 * lane + 1
        result[lane] = np.int32(first[low]) * second[low] + np.int32(first[high]) * second[high]


@_instead_of("llvm.x86.avx512.permvar.hi.512", HALVES, HALVES, HALVES)
def _vpermw(result: Any, table: Any, order: Any) -> None:
    for lane in range(32):
        result[lane] = table[order[lane] & 31]


@_instead_of("llvm.x86.avx512.vpermi2var.qi.512", BYTES, BYTES, BYTES, BYTES)
def _vpermi2b(result: Any, first: Any, order: Any, second: Any) -> None:
    for lane in range(64):
        place = order[lane] & 63
        result[lane] = second[place] if order[lane] & 64 else first[place]


_system = ctypes.CDLL(None)
_key = ctypes.c_uint32()
_system.pthread_key_create(ctypes.byref(_key), None)
_KEY = _key.value
"""Each thread has tiles of its own."""
_tiles_of = types.ExternalFunction("pthread_getspecific", BYTES(types.uint32))
_keep_tiles = types.ExternalFunction("pthread_setspecific", types.int32(types.uint32, BYTES))
_new_tiles = types.ExternalFunction("calloc", BYTES(INTEGER, INTEGER))
_free_tiles = types.ExternalFunction("free", types.void(BYTES))
_ROW, _TILE, _CONFIGURATION = 64, 1024, 8 * 1024
"""Bytes of a row, of a tile, of all tiles; the configuration stands behind them."""


@njit
def _tile(number: int) -> Any:
    """[16, 64] uint8: a tile of this thread."""
    memory = carray(_tiles_of(_KEY), _CONFIGURATION + _ROW)
    return memory[_TILE * number : _TILE * (number + 1)].reshape(16, _ROW)


@njit
def _shape(number: int) -> Any:
    """Rows of a tile, and bytes of a row."""
    settings = carray(_tiles_of(_KEY), _CONFIGURATION + _ROW)[_CONFIGURATION:]
    return np.int64(settings[48 + number]), np.int64(settings[16 + 2 * number])


@_instead_of("llvm.x86.ldtilecfg", BYTES)
def _ldtilecfg(settings: Any) -> None:
    memory = _new_tiles(_CONFIGURATION + _ROW, 1)
    carray(memory, _CONFIGURATION + _ROW)[_CONFIGURATION:] = carray(settings, _ROW)
    _keep_tiles(_KEY, memory)


@_instead_of("llvm.x86.tilerelease")
def _tilerelease() -> None:
    _free_tiles(_tiles_of(_KEY))


@_instead_of("llvm.x86.tilezero", INTEGER)
def _tilezero(number: int) -> None:
    _tile(number)[:] = 0


@_instead_of("llvm.x86.tileloadd64", INTEGER, BYTES, INTEGER)
def _tileloadd(number: int, source: Any, stride: int) -> None:
    rows, width = _shape(number)
    tile = _tile(number)
    tile[:] = 0
    for row in range(rows):
        for place in range(width):
            tile[row, place] = source[row * stride + place]


@_instead_of("llvm.x86.tilestored64", INTEGER, BYTES, INTEGER)
def _tilestored(number: int, target: Any, stride: int) -> None:
    rows, width = _shape(number)
    tile = _tile(number)
    for row in range(rows):
        for place in range(width):
            target[row * stride + place] = tile[row, place]


@_instead_of("llvm.x86.tdpbf16ps", INTEGER, INTEGER, INTEGER)
def _tdpbf16ps(sums: int, rows: int, weights: int) -> None:
    a, b, into = _tile(rows).view(np.uint32), _tile(weights).view(np.uint32), _tile(sums).view(np.float32)
    height, _ = _shape(sums)
    _, width = _shape(rows)
    even, odd = np.empty(16, np.float32), np.empty(16, np.float32)
    for row in range(height):
        even[:] = odd[:] = 0
        for step in range(width // 4):
            pair = a[row, step]
            for column in range(16):
                even[column] = _fused(_lower(pair), _lower(b[step, column]), even[column])
                odd[column] = _fused(_higher(pair), _higher(b[step, column]), odd[column])
        for column in range(16):
            into[row, column] = _normal(_normal(even[column] + odd[column]) + _normal(into[row, column]))


if (_name := os.environ.get("EMULATED_PROCESSOR")) is not None:
    emulate(_name)
