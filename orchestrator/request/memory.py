"""Gives memory back to the system after large messages.

glibc keeps what is freed for the next time, spread over one heap for each thread of gRPC: forty messages of
3.6 MB leave 200 MB behind, and as many more the next time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

PERIOD_SECONDS = 2.0
GROWTH_BYTES = 64 << 20
"""Heaps are trimmed when there is so much more than there was."""
SETTLING = 8
"""What stays is taken for memory in use little by little, one part of so many at a time: in a moment it may
be free, and only another trim gives it back."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryReturn:
    """Watches how much memory the process has, and trims its heaps when it has grown.

    `resident` tells the bytes, `trim` gives back what is free; it runs in a thread and may take a while.
    """

    def __init__(self, resident: Callable[[], int], trim: Callable[[], object]) -> None:
        self._resident = resident
        self._trim = trim
        self._baseline = resident()

    async def run(self) -> None:
        """Until cancelled, check from time to time."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Trim if there is reason to."""
        now = self._resident()
        if now > self._baseline + GROWTH_BYTES:
            await asyncio.to_thread(self._trim)
            now = self._resident()
        self._baseline = min(now, self._baseline + (now - self._baseline) // SETTLING)


def resident_bytes() -> int:
    """Memory that this process has now; 0 where that cannot be told."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
    return 0


def trim_heaps() -> None:
    """Give free memory back to the system; nothing where the library has no such function."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
