"""What an engine thread has for a session's stream: its admission, then blocks, then the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from outrider.messages import TokenBlock


class Outbox:
    """A bounded queue from the engine thread, which admits, puts and closes, to the event loop.

    The engine expands no session whose outbox is full, so it never holds more than `bound` blocks.
    `on_room` is called when a full one has room.
    """

    def __init__(self, bound: int, loop: asyncio.AbstractEventLoop, on_room: Callable[[], None]) -> None:
        self.bound = bound
        self._loop = loop
        self._on_room = on_room
        self._news = asyncio.Event()
        self._cached_length: int | None = None
        self._blocks: deque[TokenBlock] = deque()
        self._closed = False
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def full(self) -> bool:
        """True when nothing more may be put."""
        return len(self._blocks) >= self.bound

    def admit(self, cached_length: int) -> None:
        """The session is open."""
        self._cached_length = cached_length
        self._wake()

    def put(self, block: TokenBlock) -> None:
        """Append a block; the caller has seen that there is room."""
        assert not self.full
        self._blocks.append(block)
        self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing follows; whoever waits gets `error`, or is told that it is over."""
        if not self._closed:
            self._error = error
            self._closed = True
            self._wake()

    async def opened(self) -> int | None:
        """Wait for admission: tokens that needed no computing; None when it is over before that.

        Raises whatever the outbox was closed with.
        """
        await self._until(lambda: self._cached_length is not None)
        return self._cached_length

    async def get(self) -> TokenBlock | None:
        """The next block; None when the session is over. Raises whatever the outbox was closed with."""
        if not await self._until(lambda: bool(self._blocks)):
            return None
        was_full = self.full
        block = self._blocks.popleft()
        if was_full:
            self._on_room()
        return block

    async def _until(self, there: Callable[[], bool]) -> bool:
        """Wait until `there` holds; False when the outbox is closed before."""
        while not there():
            if self._closed:
                if self._error is not None:
                    raise self._error
                return False
            self._news.clear()
            if not there() and not self._closed:  # what came before the clear must not be missed
                await self._news.wait()
        return True

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)
