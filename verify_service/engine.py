"""The verify engine: the shell around its core, the queue for places, and the calls of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from outrider.engine.kv.pages import PoolStatistics
from outrider.grammar.matcher import Matcher
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import KvHandle, OpenVerify, TokenBlock
from outrider.rpc.engine_shell import MAX_REPLIES, MAX_UNREAD, EngineShell
from outrider.rpc.queues import Deliver, Outbox
from verify_service.admission import Places
from verify_service.core import VerifyCore
from verify_service.mailbox import MAX_PENDING_BLOCKS, Ask, Close, Message, Open, Propose, VerifyStream
from verify_service.transfer.table import SetAside

_T = TypeVar("_T")


class VerifyEngine(EngineShell[VerifyCore, Message]):
    """Verifies all sessions with one target. Call all methods from the event loop."""

    def __init__(
        self,
        make_core: Callable[[Deliver], VerifyCore],
        *,
        max_sessions: int,
        max_unread: int = MAX_UNREAD,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        max_messages = max_sessions * MAX_PENDING_BLOCKS + MAX_REPLIES
        super().__init__(make_core, max_messages, max_unread, on_failure)
        self._places = Places(max_sessions)
        self._transfers = itertools.count(1)

    @property
    def waiting(self) -> int:
        """Streams that wait for a place."""
        return self._places.waiting

    @property
    def moving(self) -> int:
        """Sequences on their way to or from another replica."""
        return self.core.moving

    @property
    def statistics(self) -> PoolStatistics:
        """KV pages by state."""
        return self.core.statistics

    async def open(self, opening: OpenVerify, matcher: Matcher | None = None) -> VerifyStream:
        """Ask for a session once there is a place; its outbox gets `Opened` or an error. Always `close` it.

        `matcher` is the position of the text in its grammar, if it has one.

        Raises:
            Overloaded: `max_sessions` sessions are open and equally many wait, or too many messages wait.
            Unavailable, InternalError: the engine has stopped or failed.
        """
        await self._places.take(opening.priority)
        try:
            return self._open_stream(lambda stream: Open(stream, opening, matcher))
        except OutriderError:
            self._places.free()
            raise

    def propose(self, stream: VerifyStream, block: TokenBlock) -> None:
        """Offer candidates. They are dropped if too many of the session's blocks, or of all sessions'
        messages, are unread.

        Raises:
            Unavailable, InternalError: the engine has stopped or failed.
        """
        if stream.pending < MAX_PENDING_BLOCKS and not self._full:
            self._post(Propose(stream, block, time.perf_counter()))
            stream.sent += 1

    def finish(self, stream: VerifyStream, keep: bool, move: bool = False) -> None:
        """End a session; its outbox gets `Closed`."""
        self._tell(Close(stream, keep, move))

    def close(self, stream: VerifyStream) -> None:
        """Free a session's place and everything that it still holds; the last call of every stream."""
        self._places.free()
        self._close_stream(stream, Close(stream))

    async def release(self, handle: KvHandle) -> None:
        """See `HandleTable.release`."""
        await self._run_in_engine(lambda: self.core.handles.release(handle))

    async def fork(self, handle: KvHandle) -> KvHandle:
        """See `HandleTable.fork`."""
        return await self._run_in_engine(lambda: self.core.fork(handle))

    async def keep(self, reserved: SetAside) -> KvHandle:
        """Return a handle for reserved pages that have been written."""
        return await self._run_in_engine(lambda: self.core.transfers.keep(reserved.number))

    def lent(self, handle: KvHandle) -> AbstractAsyncContextManager[SetAside]:
        """Lend the pages of a handle to be read by any thread until the `with` block ends; the handle is
        spent.

        Raises:
            StaleHandle: the handle holds nothing any more.
        """
        return self._set_aside(lambda number: self.core.transfers.lend(number, handle))

    def reserved(self, tokens: tuple[int, ...]) -> AbstractAsyncContextManager[SetAside]:
        """Reserve pages for a sequence, to be written by any thread until the `with` block ends; see `keep`.

        Raises:
            OutOfPages: too few pages are available.
        """
        return self._set_aside(lambda number: self.core.transfers.reserve(number, tokens))

    @asynccontextmanager
    async def _set_aside(self, begin: Callable[[int], SetAside]) -> AsyncIterator[SetAside]:
        """Number a transfer, start it with `begin`, and at the end drop what is left of it."""
        number = next(self._transfers)
        try:
            yield await self._run_in_engine(lambda: begin(number))
        finally:
            self._tell(Ask(lambda: self.core.transfers.drop(number), Outbox(max_unread=1)))

    async def _run_in_engine(self, work: Callable[[], _T]) -> _T:
        """Run something on the engine thread, between two steps."""
        result: _T = await self._ask(lambda reply: Ask(work, reply))
        return result
