"""Most tests of this folder need Triton's interpreter; `test_through_interpreter` runs them in a process that
has it from the start.
"""

from __future__ import annotations

import os

from tests.unit.engine.gpu.bfloat16 import mend

INTERPRETED = ("test_attention.py", "test_attention_fuzz.py", "test_runner.py", "test_sampling.py")
"""Files whose tests launch kernels."""

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = ["test_through_interpreter.py"] if INTERPRETING else list(INTERPRETED)
if INTERPRETING:
    mend()
