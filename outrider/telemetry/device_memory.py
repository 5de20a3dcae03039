"""How much memory a model's device has, and how much of it is unused."""

from __future__ import annotations

import re
from pathlib import Path

MEMORY_INFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""What a container is allowed, with control groups of version 2."""


def device_memory(device: str) -> tuple[int, int]:
    """Unused and total bytes of a device such as "cuda:0".

    Anything else is the CPU: the memory of the machine, or of the container if it has less; zeros where the
    system does not tell.
    """
    if device.startswith("cuda"):
        import torch  # a process with a model on a GPU has it; no other needs it

        return torch.cuda.mem_get_info(device)
    if not MEMORY_INFO.exists():
        return 0, 0
    found = _numbers(MEMORY_INFO)
    free, total = found["MemAvailable"] * 1024, found["MemTotal"] * 1024
    limit = _container_limit()
    if limit is None or limit >= total:
        return free, total
    return max(0, min(free, limit - _container_use())), limit


def _container_limit() -> int | None:
    """Bytes that this container may use; None without a limit."""
    try:
        return int((CONTAINER / "memory.max").read_text())
    except (OSError, ValueError):  # "max"
        return None


def _container_use() -> int:
    """Bytes that it uses and could not give back: file caches are dropped when memory is short."""
    found = _numbers(CONTAINER / "memory.stat")
    return int((CONTAINER / "memory.current").read_text()) - found["file"] + found["shmem"]


def _numbers(path: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each per line."""
    return {name: int(number) for name, number in re.findall(r"(\w+):?\s+(\d+)", path.read_text())}
