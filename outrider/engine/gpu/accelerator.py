"""What the device at hand can do: the one place that asks for CUDA and Triton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from subprocess import CalledProcessError

import torch

MIN_TRITON = (3, 4)
"""The oldest version of Triton that has all features which the kernels use."""
MIN_CAPABILITY = (8, 0)
"""The least compute capability: the first with matrix instructions for bfloat16."""
OVERLAP_CAPABILITY, OVERLAP_TRITON = (9, 0), (3, 5)
"""The least capability and the oldest Triton with which launches overlap. In Triton 3.4 the function by which
a kernel waits for others does not compile."""


@cache
def has_kernels(device: torch.device) -> bool:
    """True for a CUDA device that Triton compiles for, when Triton is installed."""
    return device.type == "cuda" and missing(device) is None


@cache
def missing(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None when they can, on the CPU through Triton's interpreter."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    found = version("triton")
    if _release(found) < MIN_TRITON:
        return f"Triton {found} is older than {_dotted(MIN_TRITON)}; install torch 2.8 or newer"
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the device has compute capability {_dotted(capability)}, below {_dotted(MIN_CAPABILITY)}"
    return unable_to_launch(device)


def unable_to_launch(device: torch.device) -> str | None:
    """Why Triton cannot launch a kernel on a device; None if it can. A small one is launched."""
    x = torch.zeros(1, device=device)
    try:
        from outrider.engine.gpu.kernels.layers import activation_kernel

        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            activation_kernel[(1,)](x, x, WIDTH=1, BLOCK=16, KIND="relu", GATED=False, OVERLAP=False)
    except Exception as error:  # of Triton, its compiler or its driver: models run without kernels
        return f"Triton cannot launch kernels ({error}); it needs a C compiler and Python's headers"
    return None


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the options of kernels that call `kernels.overlap.wait_for_earlier`."""
    overlap = (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY
        and _release(version("triton")) >= OVERLAP_TRITON
    )
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


@cache
def kernel_errors() -> tuple[type[Exception], ...]:
    """The errors that Triton raises for kernels that do not compile or do not fit the device, or whose
    launchers the C compiler refuses. None of them is a RuntimeError.
    """
    if find_spec("triton") is None:
        return ()
    from triton.errors import TritonError

    return (TritonError, CalledProcessError)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a kernel the device runs in parallel at least."""
    if device.type != "cuda":
        return 2  # the interpreter: few enough that every program has several pieces of work
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def memory_held(device: torch.device) -> int:
    """Bytes of the device that torch holds, without memory that nothing is in; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # a capture does the same
    return torch.cuda.memory_reserved(device)


def _release(found: str) -> tuple[int, ...]:
    return tuple(map(int, found.split(".")[:2]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
