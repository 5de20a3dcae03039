"""Runs this folder's other tests where kernels are interpreted.

Triton decides when it is imported, and torch imports it: only a new process can be sure to be early enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_through_the_interpreter():
    """The kernels compute what the reference computes, on the CPU."""
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
