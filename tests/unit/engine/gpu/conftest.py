"""Most tests of this folder need Triton's interpreter; `test_through_interpreter` runs them in a process that
has it from the start.
"""

from __future__ import annotations

import os

INTERPRETED = ("test_attention.py", "test_runner.py", "test_sampling.py", "test_forward.py")

collect_ignore = (
    ["test_through_interpreter.py"] if os.environ.get("TRITON_INTERPRET") == "1" else list(INTERPRETED)
)
