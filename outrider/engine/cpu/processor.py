"""What this processor has, and how wide the vectors of the kernels are on it."""

from __future__ import annotations

import importlib.util
import platform
from functools import cache

AVX512 = ("avx512f", "avx512bw", "avx512dq")
AVX2 = ("avx2", "fma")
"""In LLVM's names."""


@cache
def features() -> frozenset[str]:
    """Instruction sets, in LLVM's names; none where the package numba is not installed, which brings LLVM."""
    if platform.machine() not in ("x86_64", "AMD64") or importlib.util.find_spec("llvmlite") is None:
        return frozenset()
    from llvmlite import binding

    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


LANES = 16 if features().issuperset(AVX512) else 8
"""Float32 numbers of the registers that the kernels use: of 512 bits, or of 256."""
