"""Most tests of this folder need Triton's interpreter; `tests/integration/test_interpreted_kernels.py` runs
them in a process that has it from the start.
"""

from __future__ import annotations

import os
import sys

from tests.unit.engine.gpu.bfloat16 import mend
from tests.unit.engine.gpu.interpreter import hasten

INTERPRETED = (
    "test_attention.py",
    "test_attention_fuzz.py",
    "test_coded_models.py",
    "test_coded_product.py",
    "test_deterministic.py",
    "test_eight_bits.py",
    "test_experts.py",
    "test_fp8_kv.py",
    "test_layers.py",
    "test_mixed_attention.py",
    "test_one_row.py",
    "test_ordered_attention.py",
    "test_product.py",
    "test_runner.py",
    "test_sampling.py",
    "test_top.py",
)
"""Files whose tests launch kernels."""

DRIVEN = ("test_work.py", "test_compiled.py", "test_interpreter.py")
"""Files whose tests need Triton without its interpreter."""
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


collect_ignore = list(DRIVEN if INTERPRETING else INTERPRETED)
if INTERPRETING:
    mend()
    hasten()
if sys.platform != "linux":  # there is no Triton for it
    collect_ignore += DRIVEN
