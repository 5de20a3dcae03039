"""Reads how much memory a model's device has, and how much of it is unused."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.control_groups import control_groups

MEMORY_INFO = Path("/proc/meminfo")


def device_memory(device: str) -> tuple[int, int]:
    """Unused and total bytes of a device such as "cuda:0".

    Any other name stands for the CPU: the memory of the machine, or of the container or systemd unit if that
    has less; zeros if the system does not report it.
    """
    if device.startswith("cuda"):
        import torch  # only a process with a model on a GPU needs it, and has it

        return torch.cuda.mem_get_info(device)
    if not MEMORY_INFO.exists():
        return 0, 0
    found = _numbers(MEMORY_INFO)
    free, total = found["MemAvailable"] * 1024, found["MemTotal"] * 1024
    groups = control_groups("memory")
    limits = {group: limit for group in groups if (limit := _limit(group)) is not None and limit < total}
    left = [limit - _use(group) for group, limit in limits.items()]
    return max(0, min([free, *left])), min([total, *limits.values()])


def _limit(group: Path) -> int | None:
    """Bytes that a control group may use, by version 2 or 1; None without a limit."""
    newer, older = group / "memory.max", group / "memory.limit_in_bytes"
    try:
        return int((newer if newer.exists() else older).read_text())
    except (OSError, ValueError):  # "max"
        return None


def _use(group: Path) -> int:
    """Bytes that a control group uses, without file caches, which are dropped when memory is short."""
    newer, older = group / "memory.current", group / "memory.usage_in_bytes"
    if newer.exists():
        found = _numbers(newer.with_name("memory.stat"))
        return int(newer.read_text()) - found["file"] + found["shmem"]
    found = _numbers(older.with_name("memory.stat"))
    return int(older.read_text()) - found["total_cache"] + found["total_shmem"]


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file by their names; each line has a name and a number."""
    return {name: int(number) for name, number in re.findall(r"(\w+):?\s+(\d+)", path.read_text())}
