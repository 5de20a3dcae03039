"""Which errors say that there was no memory."""

from __future__ import annotations

import pytest
import torch

from outrider.out_of_memory import lacks_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_errors_for_lack_of_memory_are_known(error: Exception) -> None:
    """Python's, torch's on every device, Triton's and those of CUDA's libraries."""
    assert lacks_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_none_of_them(error: Exception) -> None:
    """After these a GPU is of no more use to the process."""
    assert not lacks_memory(error)


def test_torch_says_so_when_the_machine_has_none() -> None:
    """An allocation of more than there can be."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert lacks_memory(caught.value)
