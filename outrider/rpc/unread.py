"""How long a service waits for its caller, so that nobody holds a place by doing nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.protocol.errors import DeadlineExceeded

UNREAD_SECONDS = 60.0
"""Longest time in which a caller takes nothing of what waits for it, or leaves open what is over."""


@asynccontextmanager
async def within(seconds: float | None, otherwise: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded, which says `otherwise`, when the block takes longer; None: it may."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(otherwise) from None
