"""Compiles LLVM IR for this processor."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

FEATURES = {torch.bfloat16: ("avx512f", "avx512bw", "avx512bf16"), torch.float32: ("avx512f",)}
"""What the processor must have for kernels of a dtype, in LLVM's names."""


def can_run(dtype: torch.dtype) -> bool:
    """True when this processor and this installation have what kernels for a dtype need."""
    if platform.machine() not in ("x86_64", "AMD64") or importlib.util.find_spec("llvmlite") is None:
        return False
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return dtype in FEATURES and all(features.get(feature) for feature in FEATURES[dtype])


def engine(text: str) -> Any:
    """The compiled module of IR."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    parsed = binding.parse_assembly(text)
    parsed.verify()
    made = binding.create_mcjit_compiler(parsed, machine)
    made.finalize_object()
    return made


def function(module: Any, name: str, arguments: Sequence[Any], *, brief: bool = False) -> Callable[..., None]:
    """A function of a compiled module; a `brief` one keeps the interpreter's lock while it runs."""
    kind = ctypes.PYFUNCTYPE if brief else ctypes.CFUNCTYPE
    call = kind(None, *arguments)(module.get_function_address(name))
    call.module = module  # type: ignore[attr-defined]  # the code lives as long as its module
    return call
