"""The kernels are right on processors that this machine has not: those of `tests/emulated_processor.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.cpu.kernels.compiling import available
from outrider.engine.cpu.processor import AVX2, AVX512, features

ROOT = Path(__file__).parents[2]
UNIT = "tests/unit/engine"
PRODUCTS, LAYERS = f"{UNIT}/cpu/test_matmul.py", f"{UNIT}/test_layer_kernels.py"
CODES = f"{UNIT}/cpu/test_quantized_matmul.py"
OTHERS = (
    *(f"{UNIT}/cpu/test_experts.py", CODES, f"{UNIT}/fused_decoder"),
    *(f"{UNIT}/recurrent", "tests/unit/sampling/test_compiled.py"),
)
pytestmark = pytest.mark.skipif(
    not (available() and features().issuperset(AVX2)), reason="the kernels need AVX2 and the package numba"
)


def run_emulated(processor: str, *files: str, only: str = "") -> None:
    """Run tests on a processor, perhaps `only` those whose names have a part; none of its back end's may be
    skipped."""
    options = "-q", "-p", "no:cacheprovider", "-p", "tests.emulated_processor", "-k", only
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(ROOT / name) for name in files)],
        env=os.environ | {"EMULATED_PROCESSOR": processor},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]
    backend = processor.removesuffix("bf16")
    assert f": {backend}: " not in done.stdout, done.stdout[-2000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("processor", [pytest.param("avx512", marks=pytest.mark.slow), "amx"])
def test_products_and_layers_on_another_processor(processor: str) -> None:
    """With AVX-512 alone, as before Sapphire Rapids and Zen 4, and with everything that AMX needs."""
    run_emulated(processor, PRODUCTS, LAYERS)


@pytest.mark.timeout(900)
def test_codes_on_tiles() -> None:
    """Processors without tiles run this kernel here alone."""
    run_emulated("amx", CODES, only="amx")


@pytest.mark.timeout(900)
@pytest.mark.skipif(not features().issuperset(AVX512), reason="the kernels use this processor's AVX2")
def test_products_and_layers_on_an_older_processor() -> None:
    """With AVX2 alone."""
    run_emulated("avx2", PRODUCTS, LAYERS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", ["avx2", "avx512", "avx512bf16", "amx"])
def test_every_kernel_on_another_processor(processor: str) -> None:
    """Experts, codes, recurrent layers, whole decoders, and choosing tokens."""
    run_emulated(processor, PRODUCTS, LAYERS, *OTHERS)
