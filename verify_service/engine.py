"""The one thread that owns the target, and what the event loop may ask of it.

The event loop never waits for the engine: it appends to the inbox, and what the engine makes comes back
with `call_soon_threadsafe`, one call for all that leaves at once.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.engine.pages import PoolStatistics
from outrider.errors import Flood, InternalError, OutriderError, Overloaded, Unavailable
from outrider.logs import get_logger
from outrider.messages import KvHandle, OpenVerify, TokenBlock
from verify_service.admission import Places
from verify_service.core import EngineCore
from verify_service.mailbox import (
    Close,
    Delivery,
    ForkKv,
    Inbox,
    Message,
    Open,
    Outbox,
    Propose,
    ReleaseKv,
    Reply,
    Stream,
    deliver,
)

logger = get_logger(__name__)
MAX_REPLIES = 1024
"""Unary calls that may wait for the engine at once."""
STOP_SECONDS = 30.0
"""Longest wait for the step in progress when the process ends."""


class VerifyEngine:
    """Runs an `EngineCore` on a thread of its own; all methods are for the event loop.

    `make_core` is given what carries deliveries to the loop. `on_failure` is called on the loop when the
    engine has failed; every session has then got an InternalError and nothing works any more.
    """

    def __init__(
        self,
        make_core: Callable[[Callable[[Sequence[Delivery]], None]], EngineCore],
        *,
        max_sessions: int,
        max_pending_verdicts: int,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._places = Places(max_sessions)
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._core = make_core(self._hand_over)
        self._max_pending_verdicts = max_pending_verdicts
        self._on_failure = on_failure
        self._clock = clock
        self._ids = itertools.count(1)
        self._replies = 0
        self._stopping = False
        self._ended: OutriderError | None = None
        self._thread = threading.Thread(target=self._run, name="verify-engine", daemon=True)

    @property
    def sessions(self) -> int:
        """Open streams; those that wait for a place are not among them."""
        return self._places.taken

    @property
    def waiting(self) -> int:
        """Streams that wait for a place."""
        return self._places.waiting

    @property
    def statistics(self) -> PoolStatistics:
        """KV pages by state."""
        return self._core.statistics

    @property
    def failure(self) -> InternalError | None:
        """What ended the engine, unless it was stopped."""
        return self._ended if isinstance(self._ended, InternalError) else None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """End the step in progress and the thread; every session still open gets an error."""
        self._stopping = True
        self._inbox.wake()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    async def open(self, opening: OpenVerify) -> Stream:
        """Ask for a session once there is a place; its outbox gets `Opened` or an error. Always `close` it.

        Raises:
            Overloaded: `max_sessions` are open, and as many wait.
            Unavailable, InternalError: the engine has stopped or failed.
        """
        await self._places.take(opening.priority)
        stream = Stream(next(self._ids), Outbox(self._max_pending_verdicts, self._inbox.wake))
        try:
            self._post(Open(stream, opening))
        except OutriderError:
            self._places.free()
            raise
        return stream

    def propose(self, stream: Stream, block: TokenBlock) -> None:
        """Offer candidates; dropped when the session has too many unread blocks.

        Raises:
            Flood: more of them than fit between two verdicts.
        """
        if not stream.allowance.spend(len(block)):
            raise Flood("propose: more blocks or nodes than fit between two verdicts")
        if not stream.crowded:
            stream.sent += 1
            self._post(Propose(stream, block, self._clock()))

    def finish(self, stream: Stream, keep: bool) -> None:
        """End a session; its outbox gets `Closed`."""
        self._post(Close(stream, keep))

    def close(self, stream: Stream) -> None:
        """Free what a session still holds and its place; the last call of every stream."""
        self._places.free()
        if self._ended is None:
            self._inbox.put(Close(stream))

    async def release(self, handle: KvHandle) -> None:
        """Give up what a handle holds.

        Raises:
            StaleHandle: it holds nothing any more.
        """
        await self._ask(lambda reply: ReleaseKv(handle, reply))

    async def fork(self, handle: KvHandle) -> KvHandle:
        """A second handle for the same tokens.

        Raises:
            StaleHandle: the first holds nothing any more.
            OutOfPages: there is no page for the copy.
        """
        forked: KvHandle = await self._ask(lambda reply: ForkKv(handle, reply))
        return forked

    async def _ask(self, message: Callable[[Reply], Message]) -> Any:
        if self._replies >= MAX_REPLIES:
            raise Overloaded(f"{self._replies} calls wait for the engine; try again later")
        reply = Reply(self._loop.create_future())
        self._post(message(reply))
        self._replies += 1
        try:
            return await reply.future
        finally:
            self._replies -= 1

    def _post(self, message: Message) -> None:
        if self._ended is not None:
            raise self._ended
        self._inbox.put(message)

    def _run(self) -> None:
        error: OutriderError = Unavailable("this replica is shutting down; use another")
        try:
            wait: float | None = 0.0
            while not self._stopping:
                wait = self._core.turn(self._inbox.take(wait))
        except Exception:  # the thread's boundary: a caller must not wait for a dead thread
            logger.exception("the engine failed")
            error = InternalError("the engine of this replica has failed; its log has the details")
        self._core.end_all(error)
        self._call_on_loop(lambda: self._end(error))

    def _end(self, error: OutriderError) -> None:
        """The thread has ended: answer what it has not seen, and refuse what comes now."""
        self._ended = error
        for message in self._inbox.take(0.0):
            match message:
                case Open(stream):
                    deliver([stream.outbox.announce(error)])
                case ReleaseKv(reply=reply) | ForkKv(reply=reply):
                    deliver([reply.answer(error)])
        if self.failure is not None:
            self._on_failure()

    def _hand_over(self, deliveries: Sequence[Delivery]) -> None:
        self._call_on_loop(lambda: deliver(deliveries))

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)
