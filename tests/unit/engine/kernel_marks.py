"""Marks of tests that run the kernels of CPUs."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.cpu.backend import vector_backend

needs_kernels = pytest.mark.skipif(
    vector_backend(torch.float32) is None, reason="needs AVX2 or AVX-512 and the package numba"
)
needs_bfloat16 = pytest.mark.skipif(
    vector_backend(torch.bfloat16) is None, reason="needs AVX2 or AVX-512 BF16"
)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)], ids=str
)
