"""A device that computes nothing: torch's meta device in place of CUDA, and Triton without a driver.

What the host does with it is real: launches, copies and waits are counted, and kernels can be compiled for an
architecture that is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
_NO_WORK = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
    "lift_fresh",
)
_READS = ("_local_scalar_dense", "is_nonzero", "equal")


@dataclass
class Work:
    """What a step gives a device to do."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of the project's kernels by name."""
    operations: Counter[str] = field(default_factory=Counter)
    """Operations of torch on the device by name; each is a launch or more."""
    sent: int = 0
    """Copies to the device."""
    waits: int = 0
    """Times that the host waits: each read of the device."""
    on_host: int = 0
    """Operations of torch on the host."""

    @property
    def launches(self) -> int:
        """Kernels and operations."""
        return self.kernels.total() + self.operations.total()


class _Counting(TorchDispatchMode):
    """Sorts the operations of torch; what the device would be read for is zeros."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function._schema.name.removeprefix("aten::"), kwargs or {}
        with self:  # an operation that is made of others is what they are
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        inputs = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
        from_device = any(each.device == DEVICE for each in inputs)
        if name in ("_to_copy", "copy_"):
            return self._copy(function, name, args, kwargs)
        if from_device and name in _READS:
            self._work.waits += 1
            return 0
        result = function(*args, **kwargs)
        if function.is_view or name in _NO_WORK:
            return result
        if from_device or any(
            each.device == DEVICE for each in _flat([result]) if isinstance(each, torch.Tensor)
        ):
            self._work.operations[name] += 1
        else:
            self._work.on_host += 1
        return result

    def _copy(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        source, target = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
        target = source.device if target is None else target
        if source.device == DEVICE and target != DEVICE:
            self._work.waits += 1
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if source.device != DEVICE and target == DEVICE:
            self._work.sent += 1
        elif target == DEVICE:
            self._work.operations[name] += 1
        else:
            self._work.on_host += 1
        return function(*args, **kwargs)


@contextmanager
def counted() -> Iterator[Work]:
    """Count what is done with the stand-in meanwhile."""
    from triton.runtime.jit import JITFunction

    work = Work()

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        work.kernels[kernel.fn.__name__] += 1

    with patch.object(JITFunction, "run", run), _Counting(work):
        yield work


@contextmanager
def compiled_for(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Compile the kernels that are launched meanwhile for a compute capability, such as 90; yields name and
    result of each.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: dict[int, tuple[str, Any]] = {}
    compile_only, made = JITFunction.run, []
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # what is compiled is kept by device
        get_current_stream=lambda device=None: 0,
    )

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        result = compile_only(kernel, *args, grid=grid, warmup=True, **kwargs)
        if id(result) not in found:
            found[id(result)] = (kernel.fn.__name__, result)
            made.append(found[id(result)])

    active = patch.object(driver, "_active", target)
    with active, patch.object(JITFunction, "run", run), _Counting(Work()):
        yield made


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
