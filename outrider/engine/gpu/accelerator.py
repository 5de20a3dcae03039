"""What the device at hand can do: the one place that asks for CUDA and Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """True for a CUDA device that Triton compiles for, when Triton is installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a kernel the device runs side by side, at least."""
    if device.type != "cuda":
        return 2  # the interpreter: few enough that every program has several pieces of work
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
