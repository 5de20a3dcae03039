"""Stops what goes through it, until it may go on."""

from __future__ import annotations

import asyncio


class Hold(asyncio.Event):
    """Cleared, nothing passes. It begins set; `at` clears it, once, before what passes with that number."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.at: int | None = None

    async def passed(self, number: int, closed: asyncio.Event) -> bool:
        """Wait until it is set; False when `closed` is set first."""
        if number == self.at:
            self.at = None
            self.clear()
        if self.is_set():
            return True
        waits = [asyncio.create_task(event.wait()) for event in (self, closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not closed.is_set()
