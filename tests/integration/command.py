"""The `outrider` command for tests: forked from a process that has its libraries, or really started."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from tests.integration.forks import ROOT, Fork

COMMAND = (sys.executable, "-m", "outrider.cli.main")
"""What a test starts that stands between the command and its streams."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SECONDS = 60.0
"""Longest time from the last line of output to the end."""


def outrider(*arguments: str, folder: Path = ROOT) -> CompletedProcess[str]:
    """Run the command to its end in a folder, with nothing on standard input."""
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "stderr"
        fork = Fork("outrider.cli.main", arguments, ENVIRONMENT, log, folder)
        with fork.output:
            said = fork.output.read()
        return CompletedProcess(arguments, fork.wait(SECONDS), said, log.read_text())
