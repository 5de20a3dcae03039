"""How many threads compute a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.cores import default_threads
from outrider.engine.cpu.backend import Backend, matmul_type


def set_threads(wanted: int, device: torch.device) -> int:
    """Set the number of torch's threads, and return it. 0 stands for one thread per core on the CPU, and for
    one thread with a GPU."""
    count = wanted or (default_threads() if device.type == "cpu" else 1)
    torch.set_num_threads(count)
    return count


def leave_cores_to(backend: Backend) -> None:
    """Let torch have one thread beside the project's kernels: after an operation its threads would wait
    busily on the worker pool's cores."""
    if matmul_type(backend) is not None:
        torch.set_num_threads(1)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch have so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
