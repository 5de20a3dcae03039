"""Memory that was free and kept goes back to the system; memory in use is left alone before long."""

from __future__ import annotations

import asyncio

from orchestrator.request.memory import GROWTH_BYTES, MemoryReturn, resident_bytes, trim_heaps

BASE = 100 << 20


class Heap:
    """A process with memory in use, and some that is free and kept."""

    def __init__(self) -> None:
        self.used = BASE
        self.kept = 0
        self.trims = 0
        self.returning = MemoryReturn(lambda: self.used + self.kept, self.trim)

    def trim(self) -> None:
        """What is free goes back."""
        self.trims += 1
        self.kept = 0

    def looks(self, times: int) -> int:
        """How often the heap is trimmed in so many periods."""
        before = self.trims
        for _ in range(times):
            asyncio.run(self.returning.check())
        return self.trims - before


def test_a_little_growth_is_left() -> None:
    """Trimming costs something."""
    heap = Heap()
    heap.used += GROWTH_BYTES
    assert heap.looks(5) == 0


def test_what_a_flood_leaves_behind_goes_back() -> None:
    """Also where the first look falls into the flood, when there is nothing to give back yet."""
    heap = Heap()
    heap.used += 4 * GROWTH_BYTES
    assert heap.looks(1) == 1
    heap.used, heap.kept = BASE, 4 * GROWTH_BYTES
    heap.looks(1)
    assert heap.kept == 0
    assert heap.looks(10) == 0


def test_memory_that_stays_in_use_is_accepted() -> None:
    """A process that has grown for good is not trimmed for ever."""
    heap = Heap()
    heap.used += 8 * GROWTH_BYTES
    heap.looks(30)
    assert heap.looks(10) == 0


def test_the_process_itself_can_be_asked() -> None:
    """On Linux; elsewhere nothing happens."""
    assert resident_bytes() >= 0
    trim_heaps()
