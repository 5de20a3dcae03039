"""Large tensors lie in huge pages where the system has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import outrider.engine, torch
weight = torch.zeros(2**24)
print(any("hg" in line.split() for line in open("/proc/self/smaps") if line.startswith("VmFlags")))
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages"
)
@pytest.mark.parametrize(("environment", "advised"), [({}, "True"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "False")])
def test_large_tensors_ask_for_huge_pages_unless_told_otherwise(
    environment: dict[str, str], advised: str
) -> None:
    """The engine's weights are in memory for which huge pages are wanted; the environment can forbid it."""
    before = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=before | environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [advised], found.stderr
