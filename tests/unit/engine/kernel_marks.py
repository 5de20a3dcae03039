"""Marks of tests that run the kernels of CPUs."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.cpu.backend import vector_backend

needs_kernels = pytest.mark.skipif(
    vector_backend(torch.float32) is None, reason="needs AVX2 or AVX-512 and the package numba"
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
