"""Records the calls of kernels that a forward makes, so that they can be repeated without the interpreter.

Between the kernels of a small step Python takes as long as they do, or longer: their weights have driven it
out of the caches. So a forward is recorded with the addresses of all that its kernels read and write, and
`outrider.engine.cpu.kernels.replay` makes the same calls again. This is what a CUDA graph is on a GPU.

A recorded forward may call kernels of the project, make memory and views of it, copy rows, add numbers to
others of their shape, and multiply them by a factor. A function `with_break` is called by Python in each
repetition. Torch computes nothing else: see `Recording.refused`.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.cpu.backend import kind_of, vector_backend
from outrider.engine.cpu.kernels import compiling

_aten = torch.ops.aten
_MAKE = {_aten.empty, _aten.new_empty, _aten.empty_like}
_MULTIPLY = {_aten.mul, _aten.mul_}
CHUNK = 1 << 20
"""Fewest bytes by which scratch memory grows."""


class Scratch:
    """Memory for what a forward makes between its kernels. Recordings share it: one runs at a time.

    Attention cuts a forward into stretches. What is made before the first one may be read until the end; what
    is made later is read up to the end of the next stretch, so that two stretches' memory is used in turn.
    """

    def __init__(self) -> None:
        self._chunks: tuple[list[Tensor], ...] = ([], [], [])
        self.begin()

    def begin(self) -> None:
        """A forward begins."""
        self._stretch = 0
        self._used = [(0, 0)] * 3

    def next_stretch(self) -> None:
        """The attention of a layer begins."""
        self._stretch = 1 + self._stretch % 2
        self._used[self._stretch] = 0, 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape, contiguous, at a multiple of 64 bytes."""
        chunks, (number, used) = self._chunks[self._stretch], self._used[self._stretch]
        size = prod(shape) * dtype.itemsize
        while number < len(chunks) and used + size > chunks[number].nbytes:
            number, used = number + 1, 0
        if number == len(chunks):
            chunks.append(_aligned(max(size, CHUNK)))
        self._used[self._stretch] = number, used + size + -size % 64
        return chunks[number][used : used + size].view(dtype).view(shape)


class Recording:
    """The calls of one forward."""

    def __init__(self, scratch: Scratch) -> None:
        self.refused = ""
        """What torch computed without a break, which cannot be repeated; empty if there was nothing."""
        self.lines: list[list[int]] = []
        """The calls, see `outrider.engine.cpu.kernels.replay`."""
        self.attention: list[tuple[int, int, array[int]]] = []
        """Calls of attention: the line, the `id` of what they see, and their table."""
        self.breaks: list[tuple[int, Callable[[], None]]] = []
        """Calls of Python, and how many lines come before each."""
        self.kept: list[object] = []
        """The kernels and their tables. The model and the scratch own what these read and write."""
        self._scratch = scratch

    def record(self, forward: Callable[[], Tensor]) -> Tensor:
        """Run a forward and record it."""
        self._scratch.begin()
        _thread.recording = self
        try:
            with _Watch():  # type: ignore[no-untyped-call]
                return forward()
        finally:
            _thread.recording = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that the repeated calls use again."""
        return self._scratch.empty(shape, dtype)

    def add_job(self, kernel: Callable[..., None], table: array[int], parts: int, size: int) -> None:
        """See `WorkerPool.run`."""
        self.kept += (kernel, table)
        self.lines.append([compiling.address_of(kernel), table.buffer_info()[0], parts, size])

    def add_written_job(self, kernel: Callable[..., None], table: Tensor, parts: Tensor, size: int) -> None:
        """See `WorkerPool.run_written`."""
        self.kept += (kernel, table, parts)
        self.lines.append([compiling.address_of(kernel), table.data_ptr(), -parts.data_ptr(), size])

    def add_attention(self, seen: object, table: array[int]) -> None:
        """The next job is attention, which sees `seen`."""
        self.attention.append((len(self.lines), id(seen), table))

    def add_break(self, function: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> Sequence[Tensor]:
        """Return what the function makes of x, in memory where each repetition leaves what it makes then."""

        def again() -> None:
            for place, made in zip(places, function(x), strict=True):
                place.copy_(made)

        with unrecorded():
            found = function(x)
            places = [self.empty(made.shape, made.dtype).copy_(made) for made in found]
        self.breaks.append((len(self.lines), again))
        return places

    def next_stretch(self) -> None:
        """The attention of a layer begins."""
        self._scratch.next_stretch()


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def recording() -> Recording | None:
    """The recording that is under way in this thread."""
    return _thread.recording


@contextmanager
def unrecorded() -> Iterator[None]:
    """Make memory that outlives a forward, whether it is recorded or not."""
    before, _thread.recording = _thread.recording, None
    try:
        yield
    finally:
        _thread.recording = before


def with_break(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that does the same, and is a break of recordings."""
    call = several_with_break(lambda x: (function(x),))
    return lambda x: call(x)[0]


def several_with_break(
    function: Callable[[Tensor], Sequence[Tensor]],
) -> Callable[[Tensor], Sequence[Tensor]]:
    """Do as `with_break`, for a function that makes several tensors of one."""

    def call(x: Tensor) -> Sequence[Tensor]:
        under_way = recording()
        return function(x) if under_way is None else under_way.add_break(function, x)

    return call


def launch(kernel: Callable[..., None], *numbers: int) -> None:
    """Call a kernel whose work is one part, with a table of these numbers."""
    table = array("q", numbers)
    kernel(table.buffer_info()[0], 0, 0)
    if _thread.recording is not None:
        _thread.recording.add_job(kernel, table, 1, 1)


@cache
def bits_of(number: float) -> int:
    """A float64 number's bits, as a table for kernels holds it."""
    return int(np.float64(number).view(np.int64))


def prepare() -> None:
    """Load what the first recording needs."""
    _replay()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all that torch would compute in a recorded forward, and does what may be recorded itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See TorchDispatchMode."""
        recording, name = _thread.recording, func.overloadpacket
        if recording is None:
            return func(*args, **(kwargs or {}))
        if name in _MAKE:
            like = func(*args, **(kwargs or {}))
            return recording.empty(like.shape, like.dtype)
        if name is _aten.embedding and args[0].is_contiguous():
            return _chosen(recording, args[0], args[1])
        if name is _aten.index_select and args[1] == 0 and args[0].ndim == 2 and args[0].stride(1) == 1:
            return _chosen(recording, args[0], args[2])
        if name is _aten.add_ and not kwargs and _are_alike(*args):
            return _added(*args)
        if name in _MULTIPLY and _is_factor(args[1]) and _are_alike(args[0], args[0]):
            target = args[0] if name is _aten.mul_ else recording.empty(args[0].shape, args[0].dtype)
            return _multiplied(target, args[0], float(args[1]))
        if name is _aten.copy_ and _are_rows(args[0], args[1]):
            return _copied(args[1], None, args[0])
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not _lies_in(made, *args[:1]):
            recording.refused = str(func)
        return made


def _chosen(recording: Recording, source: Tensor, which: Tensor) -> Tensor:
    """[rows, C] -> [R, C], of which [R]."""
    target = recording.empty((len(which), source.shape[1]), source.dtype)
    return _copied(source, which, target)


def _copied(source: Tensor, which: Tensor | None, target: Tensor) -> Tensor:
    """Copy rows [R, C] of the source, the first ones or those of `which` [R], to the target."""
    size = source.element_size()
    launch(
        _replay().copy_rows,
        *(target.shape[0], target.shape[1] * size, source.data_ptr(), source.stride(0) * size),
        *(0 if which is None else which.data_ptr(), target.data_ptr(), target.stride(0) * size),
    )
    return target


def _multiplied(target: Tensor, source: Tensor, factor: float) -> Tensor:
    numbers = source.data_ptr(), target.data_ptr(), source.numel()
    launch(_elementwise().multiply(kind_of(source.dtype)), *numbers, bits_of(factor))
    return target


def _added(target: Tensor, source: Tensor) -> Tensor:
    numbers = target.data_ptr(), source.data_ptr(), target.numel()
    launch(_elementwise().add(kind_of(target.dtype)), *numbers)
    return target


def _lies_in(made: object, given: object = None) -> bool:
    """True for tensors in the memory of another one: views, which compute nothing."""
    parts = made if isinstance(made, list | tuple) else [made]
    return isinstance(given, Tensor) and all(
        isinstance(part, Tensor) and part.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        for part in parts
    )


def _are_alike(target: Tensor, source: object) -> bool:
    """True for contiguous numbers of one shape and dtype, which kernels take."""
    return (
        isinstance(source, Tensor)
        and (source.shape, source.dtype) == (target.shape, target.dtype)
        and target.is_contiguous()
        and source.is_contiguous()
        and vector_backend(target.dtype) is not None
    )


def _is_factor(given: object) -> bool:
    """True for a number, also in a tensor: it is the same in each step, because torch may compute none in a
    recorded forward."""
    return isinstance(given, int | float) or (isinstance(given, Tensor) and given.ndim == 0)


def _are_rows(target: Tensor, source: Tensor) -> bool:
    """True for rows of equally many numbers of one dtype, each in one piece."""
    same = target.shape == source.shape and target.dtype == source.dtype
    return same and target.ndim == 2 and target.stride(1) == source.stride(1) == 1


def _aligned(size: int) -> Tensor:
    made = torch.empty(size + 64, dtype=torch.uint8)
    first = -made.data_ptr() % 64
    return made[first : first + size]


@cache
def _replay() -> Any:
    from outrider.engine.cpu.kernels import replay

    return replay


@cache
def _elementwise() -> Any:
    from outrider.engine.cpu.kernels import elementwise

    return elementwise
