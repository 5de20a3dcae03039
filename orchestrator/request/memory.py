"""Returns memory to the system after large messages.

glibc keeps freed memory for later, spread over one heap for each thread of gRPC: forty messages of 3.6 MB
leave 200 MB behind, and the next forty as much again.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

PERIOD_SECONDS = 2.0
GROWTH_BYTES = 64 << 20
"""Growth of memory in bytes after which heaps are trimmed."""
SETTLING = 8
"""Divisor of the growth that remains after a trim: each check counts only this part of it as in use. The rest
may be freed soon, and only another trim would return it."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryReturn:
    """Watches how much memory the process has, and trims its heaps when it has grown.

    `resident` returns the bytes in use. `trim` returns free memory; it runs in a thread and may take a while.
    """

    def __init__(self, resident: Callable[[], int], trim: Callable[[], object]) -> None:
        self._resident = resident
        self._trim = trim
        self._baseline = resident()

    async def run(self) -> None:
        """Check every `PERIOD_SECONDS` until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Trim the heaps if memory has grown enough."""
        now = self._resident()
        if now > self._baseline + GROWTH_BYTES:
            await asyncio.to_thread(self._trim)
            now = self._resident()
        self._baseline = min(now, self._baseline + (now - self._baseline) // SETTLING)


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 on systems that do not tell it."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
    return 0


def trim_heaps() -> None:
    """Return free memory to the system; does nothing when the C library has no such function."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
