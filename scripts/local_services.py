"""The three services on this machine for as long as a block runs, for the demo and the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.widen import DEMO_INTERMEDIATE_SIZE, widen

ROOT = Path(__file__).resolve().parents[1]
TARGET, DRAFT = ROOT / "models/demo/target", ROOT / "models/demo/draft"
WIDE_TARGET = ROOT / ".cache/demo-target-216m"


def widened_target() -> Path:
    """The demo target widened to 216 M parameters; made once."""
    if not (WIDE_TARGET / "config.json").exists():
        print("Widening the target to 216 M parameters: same outputs, the weight traffic of a larger model.")
        widen(TARGET, WIDE_TARGET, DEMO_INTERMEDIATE_SIZE)
    return WIDE_TARGET


@contextmanager
def services(target: Path, dtype: str, log: Path) -> Iterator[str]:
    """`outrider up` with the demo draft until the block ends; yields the endpoint.

    One thread per service, and a core of its own for each model where the machine has two.
    """
    command = [sys.executable, "-m", "outrider", "up", "--target", str(target), "--draft", str(DRAFT)]
    flags = ["--dtype", dtype, "--device", "cpu", "--port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield _endpoint(process, log)
    finally:
        process.terminate()
        process.wait(60)


def _endpoint(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return str(json.loads(line)["endpoint"])
    raise SystemExit(f"The services did not start:\n{log.read_text()[-2000:]}")
