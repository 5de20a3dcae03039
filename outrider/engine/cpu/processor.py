"""Which instruction sets this processor has, and what the kernels use of them."""

from __future__ import annotations

import importlib.util
import platform
from functools import cache

AVX512 = ("avx512f", "avx512bw", "avx512dq")
AVX2 = ("avx2", "fma")
"""The instruction sets of the back ends, with LLVM's names."""


@cache
def features() -> frozenset[str]:
    """The instruction sets, with LLVM's names; none if the package numba, which brings LLVM, is not
    installed."""
    if platform.machine() not in ("x86_64", "AMD64") or importlib.util.find_spec("llvmlite") is None:
        return frozenset()
    from llvmlite import binding

    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


LANES = 16 if features().issuperset(AVX512) else 8
"""Float32 numbers in a register that the kernels use: one of 512 bits, or of 256."""
HAS_BF16 = LANES == 16 and "avx512bf16" in features()
"""True with AVX-512 BF16: one instruction multiplies pairs of bfloat16 numbers. Elsewhere the two numbers of
a pair are taken apart, and multiplied as float32."""
