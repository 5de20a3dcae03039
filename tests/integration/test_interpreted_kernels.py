"""Runs the tests of `tests/unit/engine/gpu` that launch kernels where kernels are interpreted.

Triton decides when it is imported, and torch imports it: only a new process can be sure to be early enough.
They take minutes, so they stand here, among the tests that are started first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.engine.gpu.conftest import INTERPRETED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/unit/engine/gpu"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone")


def run_interpreted(marked: str) -> None:
    """Run the tests with such marks; where Triton is missing they fail, as they do when one is skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
        + [str(FOLDER / name) for name in INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.timeout(1800)
def test_kernels_through_the_interpreter():
    """The kernels compute what the reference computes, on the CPU."""
    run_interpreted("not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_steps_through_the_interpreter():
    """The long part of the fuzz."""
    run_interpreted("slow")
