"""Compiles the kernels of `rank_ir` for this processor and calls them with tensors.

A call over few logits keeps the interpreter's lock: to give it up lets another thread in for longer than
the work takes.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from itertools import repeat
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, float32

from outrider.acceptance import SHARPNESS_GRID
from outrider.sampling.processors import Row
from outrider.sampling.truncation import truncates

BRIEF = 2**20
"""Logits that are searched without giving up the lock: a fraction of a millisecond."""
_LINE = (c_void_p, c_int64, c_int64, c_void_p, c_int64)
_ARGUMENTS = {
    "choose": (*_LINE, c_void_p, c_void_p, c_void_p),
    "rank": (*_LINE, c_int64, c_void_p, c_void_p, c_void_p),
}


class Ranked(NamedTuple):
    """The leaders of one row, best first."""

    tokens: list[int]
    buckets: list[int]
    winners: tuple[int, ...]
    """By sharpness of the grid; of greedy rows all the same token."""


def fits(logits: Tensor) -> bool:
    """True when the kernels take some logits [N, V]."""
    return logits.dtype is float32 and logits.device.type == "cpu" and available()


@cache
def available() -> bool:
    """True when this installation can compile the kernels; any processor can run them."""
    return importlib.util.find_spec("llvmlite") is not None


def prepare() -> None:
    """Compile the kernels, where they can be."""
    if available():
        _code()


def choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The token that leads each row: logits [N, V], as `fits` says."""
    count = len(rows)
    call = _Call("choose", logits, rows, repeat(1.0), results=count, leaders=3)
    call.run(call.results, call.leaders, call.scratch)
    return call.result(0, count)


def rank(logits: Tensor, rows: Sequence[Row], slopes: Sequence[float], count: int) -> list[Ranked]:
    """The `count` leaders of each row by `slope x logit / temperature + noise`: logits [N, V], slopes [N].

    Fewer than `count` where truncation left fewer.
    """
    words = _code().ranking_words(count)
    call = _Call("rank", logits, rows, slopes, results=words * len(rows), leaders=3 * count + 8)
    call.run(count, call.results, call.leaders, call.scratch)
    found = call.result(0, words * len(rows))
    ranked = []
    for start in range(0, len(found), words):
        buckets, left = start + count, start + 2 * count
        many, winners = found[left], left + 1
        ranked.append(
            Ranked(
                found[start : start + many],
                found[buckets : buckets + many],
                tuple(found[winners : winners + len(SHARPNESS_GRID)]),
            )
        )
    return ranked


class _Room(threading.local):
    """Memory that a thread's calls share; it grows and stays."""

    def __init__(self) -> None:
        self.words = np.empty(0, np.int64)
        self.address = 0

    def of(self, words: int) -> int:
        """The address of so many 64-bit numbers."""
        if words > len(self.words):
            self.words = np.empty(words, np.int64)
            self.address = self.words.ctypes.data
        return self.address


_room = _Room()


class _Call:
    """One call: the rows described in memory, then results, leaders and scratch."""

    def __init__(
        self,
        name: str,
        logits: Tensor,
        rows: Sequence[Row],
        slopes: Iterable[float],
        *,
        results: int,
        leaders: int,
    ) -> None:
        code, size = _code(), logits.shape[1]
        self._logits = logits if logits.stride(1) == 1 else logits.contiguous()
        values, truncated = _described(rows, slopes, size)
        self._first = len(values)
        room = self._first + results + leaders + code.words_of_scratch(size, truncated)
        self._rows = _room.of(room)
        _packer(len(rows)).pack_into(_room.words.data, 0, *values)
        self.results = self._rows + 8 * self._first
        self.leaders = self.results + 8 * results
        self.scratch = self.leaders + 8 * leaders
        self._function = (code.brief if len(rows) * size <= BRIEF else code.long)[name]
        self._line = (self._logits.data_ptr(), self._logits.stride(0), size, self._rows, len(rows))

    def run(self, *arguments: int) -> None:
        """Call the kernel."""
        self._function(*self._line, *arguments)

    def result(self, start: int, end: int) -> list[int]:
        """Some of the results."""
        found: list[int] = _room.words[self._first + start : self._first + end].tolist()
        return found


def _described(rows: Sequence[Row], slopes: Iterable[float], size: int) -> tuple[list[float], bool]:
    """The words of all rows, see `room_ir`, and whether any is truncated."""
    words: list[float] = []
    last, any_truncated = None, False
    for row, slope in zip(rows, slopes, strict=False):
        params = row.params
        if params is not last:  # a session's rows share one
            last, greedy = params, params.greedy
            truncated = not greedy and truncates(params)
            any_truncated |= truncated
            flags, temperature = greedy + 2 * truncated, 1.0 if greedy else params.temperature
            top_k = params.top_k if 0 < params.top_k < size else size
            top_p = params.top_p if params.top_p < 1.0 else math.inf
            log_min_p = math.log(params.min_p) if params.min_p else -math.inf
        scale = 1.0 if greedy else slope / temperature
        words += (
            *(params.seed, row.position, flags, top_k),
            *(scale, slope, temperature, top_p, log_min_p),
        )
    return words, any_truncated


@cache
def _packer(rows: int) -> Struct:
    return Struct("=" + _code().row_format * rows)


class _Code(NamedTuple):
    """The compiled functions, those that keep the lock and those that do not, and what they work with."""

    brief: dict[str, Callable[..., None]]
    long: dict[str, Callable[..., None]]
    row_format: str
    words_of_scratch: Callable[[int, bool], int]
    ranking_words: Callable[[int], int]


@cache
def _code() -> _Code:
    from outrider.engine.kernels.compiler import engine, function
    from outrider.sampling.kernels.rank_ir import module, ranking_words
    from outrider.sampling.kernels.room_ir import ROW_FORMAT, words_of_scratch

    made = engine(_optimised(module()))
    brief, long = (
        {name: function(made, name, kinds, brief=keeps) for name, kinds in _ARGUMENTS.items()}
        for keeps in (True, False)
    )
    return _Code(brief, long, ROW_FORMAT, words_of_scratch, ranking_words)


def _optimised(text: str) -> str:
    """The same IR with variables in registers and small functions where they are called."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine: Any = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    parsed = binding.parse_assembly(text)
    parsed.verify()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(2))
    builder.getModulePassManager().run(parsed, builder)
    return str(parsed)
