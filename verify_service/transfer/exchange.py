"""Sends keys and values to other replicas and receives theirs, page by page, while the engine goes on.

The engine sets the sequence aside. Its pages are then read and written here, a few at a time, on threads of
the event loop's pool. The orchestrator makes the calls and carries the parts from one replica to the other:
replicas do not connect to each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TypeVar

from outrider.engine.kv.page_memory import PageMemory
from outrider.engine.kv.page_pool import all_page_keys
from outrider.protocol.errors import Flood, InvalidRequest
from outrider.protocol.kv_parts import KvLayout, KvPages, KvPart, KvTokens, page_digest
from outrider.protocol.messages import KvHandle
from outrider.rpc.unread import FIRST_SECONDS, within
from verify_service.engine import VerifyEngine
from verify_service.transfer.table import SetAside

PART_BYTES = 1 << 20
"""Bytes of pages in one part, unless one page is larger. A transfer holds about one part in memory at a
time."""
MAX_TRANSFERS = 4
"""Most transfers at once in each direction; others wait their turn."""
MIN_SECONDS = 1.0
"""Seconds that every transfer may take at least."""

_T = TypeVar("_T")


class KvExchange:
    """Transfers of one replica. Call all methods from the event loop."""

    def __init__(
        self,
        engine: VerifyEngine,
        memory: PageMemory,
        layout: KvLayout,
        vocabulary_size: int,
        context_length: int,
        longest_seconds: float,
    ) -> None:
        """`longest_seconds` is the longest time that a transfer may hold pages."""
        self._engine = engine
        self._memory = memory
        self._layout = layout
        self._vocabulary_size = vocabulary_size
        self._context_length = context_length
        self._longest_seconds = longest_seconds
        self._sending = asyncio.Semaphore(MAX_TRANSFERS)
        self._receiving = asyncio.Semaphore(MAX_TRANSFERS)

    async def send(self, handle: KvHandle, write: Callable[[KvPart], Awaitable[None]]) -> None:
        """Write the layout and all pages that a handle holds; the handle is spent.

        Raises:
            StaleHandle: the handle holds nothing any more.
            DeadlineExceeded: the reader is too slow.
        """
        async with self._sending, _within(self._longest_seconds), self._engine.lent(handle) as lent:
            await write(self._layout)
            keys = await _finished(partial(all_page_keys, lent.tokens, self._layout.page_size))
            for first in range(0, len(keys), self._pages_of_part):
                await write(await _finished(partial(self._read, lent, keys, first)))

    async def receive(self, parts: AsyncIterator[KvPart]) -> KvHandle:
        """Receive a sequence; return a handle for it.

        Raises:
            InvalidRequest: a part is not of the kind expected at its place, or the layout differs.
            OutOfPages: the open sessions leave too little memory for it.
            Flood: more pages come than the tokens need.
            DeadlineExceeded: computing the tokens would take less time.
        """
        async with within(
            FIRST_SECONDS, f"part: none came within {FIRST_SECONDS:g} s; send the tokens first"
        ):
            tokens = self._checked(await _next(parts, KvTokens))
        async with self._receiving, self._engine.reserved(tokens) as reserved:
            seconds = max(MIN_SECONDS, min(reserved.recompute_seconds, self._longest_seconds))
            async with _within(seconds):
                self._layout.check(await _next(parts, KvLayout))
                await self._fill(reserved, parts)
            return await self._engine.keep(reserved)

    async def _fill(self, reserved: SetAside, parts: AsyncIterator[KvPart]) -> None:
        """Write the pages of a sequence as they arrive; return when the parts end after the last page."""
        keys = await _finished(partial(all_page_keys, reserved.tokens, self._layout.page_size))
        done = 0
        async for part in parts:
            if not isinstance(part, KvPages):
                raise InvalidRequest("part", "must be pages after the layout")
            done = self._after(part, done, len(keys))
            await _finished(partial(self._write, reserved, keys, part))
        if done < len(keys):
            raise InvalidRequest("part.pages", f"end after {done} of {len(keys)} pages")

    def _after(self, part: KvPages, done: int, pages: int) -> int:
        """Return how many pages are done with this part, after `done` pages.

        Raises:
            InvalidRequest: the part does not follow the pages before, is empty, or has a page of another
            size. Flood: there are more pages than the sequence has.
        """
        if part.first != done or not part.contents:
            raise InvalidRequest("part.pages.first", f"must be {done}, with one page or more")
        if done + len(part.contents) > pages:
            raise Flood(f"part.pages: more than the {pages} pages of the tokens")
        wrong = next((len(page) for page in part.contents if len(page) != self._memory.page_bytes), None)
        if wrong is not None:
            raise InvalidRequest(
                "part.pages.contents", f"must have {self._memory.page_bytes} bytes, not {wrong}"
            )
        return done + len(part.contents)

    @property
    def _pages_of_part(self) -> int:
        return max(1, PART_BYTES // self._memory.page_bytes)

    def _read(self, lent: SetAside, keys: list[bytes], first: int) -> KvPages:
        """Read some pages with their digests, on a thread."""
        size = self._layout.page_size
        chosen = range(first, min(first + self._pages_of_part, len(keys)))
        contents = tuple(
            self._memory.read(lent.pages[page], min(size, len(lent.tokens) - page * size)) for page in chosen
        )
        return KvPages(first, contents, _digests(keys[first:], contents))

    def _write(self, reserved: SetAside, keys: list[bytes], part: KvPages) -> None:
        """Check some pages and store them, on a thread.

        Raises:
            InvalidRequest: a page does not match its digest.
        """
        if _digests(keys[part.first :], part.contents) != part.digests:
            raise InvalidRequest("part.pages.digests", "do not fit the pages and their tokens")
        for page, content in zip(reserved.pages[part.first :], part.contents, strict=False):
            self._memory.write(page, content)

    def _checked(self, part: KvTokens) -> tuple[int, ...]:
        tokens = part.token_ids
        if not 0 < len(tokens) < self._context_length:
            raise InvalidRequest("part.tokens", f"must be 1 to {self._context_length - 1}, not {len(tokens)}")
        if max(tokens) >= self._vocabulary_size:
            raise InvalidRequest("part.tokens", f"must be below the vocabulary size {self._vocabulary_size}")
        return tokens


Part = TypeVar("Part", KvTokens, KvLayout)


async def _next(parts: AsyncIterator[KvPart], kind: type[Part]) -> Part:
    part = await anext(parts, None)
    if not isinstance(part, kind):
        raise InvalidRequest("part", f"must be {kind.__name__.removeprefix('Kv').lower()} here")
    return part


def _digests(keys: Iterable[bytes], contents: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(page_digest(key, content) for key, content in zip(keys, contents, strict=False))


def _within(seconds: float) -> AbstractAsyncContextManager[None]:
    """Raise DeadlineExceeded if the `with` block takes longer."""
    return within(seconds, f"the keys and values took more than {seconds:.1f} s")


async def _finished(work: Callable[[], _T]) -> _T:
    """Run a blocking function on a thread, to its end even if cancelled: the pages that it works on are
    released afterwards."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # a transfer over its time, whose caller leaves as well
                await asyncio.wait({task})
        raise
