"""How much memory a model's device has, and how much of it is unused."""

from __future__ import annotations

import re
from pathlib import Path

MEMORY_INFO = Path("/proc/meminfo")


def device_memory(device: str) -> tuple[int, int]:
    """Unused and total bytes of a device such as "cuda:0".

    Anything else is the CPU: the memory of the machine, whatever a container is allowed; zeros where the
    system does not tell.
    """
    if device.startswith("cuda"):
        import torch  # a process with a model on a GPU has it; no other needs it

        return torch.cuda.mem_get_info(device)
    if not MEMORY_INFO.exists():
        return 0, 0
    kilobytes = dict(re.findall(r"(\w+):\s+(\d+) kB", MEMORY_INFO.read_text()))
    return int(kilobytes["MemAvailable"]) * 1024, int(kilobytes["MemTotal"]) * 1024
