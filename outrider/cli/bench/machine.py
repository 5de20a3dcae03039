"""Describes the machine that figures were measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from outrider.cores import allowed_cores


def describe() -> dict[str, str]:
    """Date, machine and Python."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": ",".join(map(str, allowed_cores())),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """Name of the processor, as the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [row.partition(":")[2].strip() for row in lines if row.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_gib() -> str:
    try:
        return str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30)
    except (AttributeError, ValueError, OSError):  # a system without it
        return "unknown"
