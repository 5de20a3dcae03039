"""What a figure was measured on, and with what."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from scripts.child import ROOT

PACKAGES = ("torch", "transformers", "grpcio")


def describe() -> dict[str, str]:
    """Machine, versions and date."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": ",".join(map(str, cores())),
        "memory_gib": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        **{name: version(name) for name in PACKAGES},
    }


def lines(about: Mapping[str, str]) -> str:
    """A line per fact."""
    return "\n".join(f"{name}: {value}" for name, value in about.items())


def cores() -> list[int]:
    """Cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def cpu_model() -> str:
    """Name of the processor, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [row.partition(":")[2].strip() for row in lines if row.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
