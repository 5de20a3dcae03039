"""Bounds how long a service waits for its caller, so that no caller holds a place without using it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outrider.protocol.errors import DeadlineExceeded, InvalidRequest

FIRST_SECONDS = 30.0
"""Longest wait for the first message of a call."""
UNREAD_SECONDS = 60.0
"""Longest time in which a caller reads nothing that waits to be sent, or does not close what has ended."""

SILENT_SECONDS = 600.0
"""Longest time in which the caller of a draft session sends nothing. It sends a verdict at every step."""


@asynccontextmanager
async def within(
    seconds: float | None, otherwise: str, kind: type[DeadlineExceeded] = DeadlineExceeded
) -> AsyncIterator[None]:
    """Raise a `kind` with the text `otherwise` if the `with` block takes longer; None: no limit."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise kind(otherwise) from None


async def opening_of(requests: AsyncIterator[Any]) -> Any:
    """The contents of a session's first message, which must be `open`.

    Raises:
        InvalidRequest: it is another one, or the stream ends before it.
        DeadlineExceeded: it does not come in time.
    """
    async with within(FIRST_SECONDS, f"open: not sent for {FIRST_SECONDS:g} s; send it first"):
        message = await anext(requests, None)
    if message is None:
        raise InvalidRequest("open", "must be sent before the stream ends")
    if message.WhichOneof("message") != "open":
        raise InvalidRequest("open", "must be the first message")
    return message.open
