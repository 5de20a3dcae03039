"""Runs the thread that owns a model, and carries messages between it and the event loop.

The event loop never waits for the thread: it puts typed messages into an inbox. The thread runs a synchronous
core, turn by turn. All results of a turn go back in one `call_soon_threadsafe`. The draft and the verify
service each run their own core in this shell.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from outrider.out_of_memory import problem_of
from outrider.protocol.errors import InternalError, OutriderError, Overloaded, Unavailable
from outrider.rpc.queues import Deliver, Inbox, Outbox, Stream, deliver
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
MAX_REPLIES = 1024
"""Most unary calls that may wait for the engine at once."""
MAX_UNREAD = 64
"""Number of unread events at which a slow reader's session pauses."""
STOP_SECONDS = 30.0
"""Longest wait, in seconds, for the turn in progress when the process ends."""
LOOK_SECONDS = 5.0
"""Seconds between looks at whether the engine goes on."""
STUCK_LOOKS = 120
"""Number of looks in a row at one turn, ten minutes in all, at which the engine counts as stuck. Looks are
counted and not seconds, because a process that was stopped meanwhile is not stuck."""


class Core(Protocol):
    """The work of a service. It runs on the engine thread and knows nothing of threads or event loops."""

    def turn(self, messages: Sequence[Any], /) -> float | None:
        """Take the messages in order and work once. Returns the seconds to sleep if no message comes (None:
        until one comes)."""


AnyCore = TypeVar("AnyCore", bound=Core)
Message = TypeVar("Message")


class EngineShell(Generic[AnyCore, Message]):
    """Runs a core on a thread of its own; all methods are called from the event loop.

    `make_core` gets the function that carries deliveries to the loop. At most `max_messages` wait for the
    core; a session pauses while `max_unread` of its events are unread. `on_failure` is called on the loop
    after the core has failed; every session has then got an InternalError, and the engine cannot be used any
    more.
    """

    def __init__(
        self,
        make_core: Callable[[Deliver], AnyCore],
        max_messages: int,
        max_unread: int,
        on_failure: Callable[[], None],
    ) -> None:
        self.core = make_core(partial(self._call_on_loop, deliver))
        self._max_messages = max_messages
        self._max_unread = max_unread
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox[Message] = Inbox()
        self._ids = itertools.count(1)
        self._streams: set[Stream[Any]] = set()
        self._replies: set[Outbox[Any]] = set()
        self._stopping = False
        self._turn = 0
        """Number of the turn in progress; 0 while the thread waits."""
        self._looking: asyncio.Task[None] | None = None
        self._broken: OutriderError | None = None
        self._ended: OutriderError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def sessions(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    @property
    def failure(self) -> InternalError | None:
        """The error that ended the engine; None while it runs, and if it was stopped."""
        return self._ended if isinstance(self._ended, InternalError) else None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._looking = self._loop.create_task(self._look())

    async def stop(self) -> None:
        """End the turn in progress and the thread; every session still open gets an error."""
        self._stopping = True
        self._inbox.wake()
        if self._looking is not None:
            self._looking.cancel()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def fail(self, error: OutriderError) -> None:
        """Make the engine fail with `error` after the turn in progress; may be called on any thread."""
        self._broken = error
        self._inbox.wake()

    def _open_stream(self, opening: Callable[[Stream[Any]], Message]) -> Stream[Any]:
        """Post the opening of a new stream. The caller must call `_close_stream` at its end.

        Raises:
            Overloaded, Unavailable, InternalError: see `_post`.
        """
        stream: Stream[Any] = Stream(next(self._ids), Outbox(self._max_unread, self._inbox.wake))
        self._post(opening(stream))
        self._streams.add(stream)
        return stream

    def _close_stream(self, stream: Stream[Any], closing: Message) -> None:
        """Forget a stream; the core frees its memory within one turn."""
        self._streams.discard(stream)
        self._tell(closing)

    async def _ask(self, message: Callable[[Outbox[Any]], Message]) -> Any:
        """Post a message with an outbox for the reply; returns or raises the core's answer.

        Raises:
            Overloaded, Unavailable, InternalError: see `_post`; also Overloaded when too many calls wait.
        """
        if len(self._replies) >= MAX_REPLIES:
            raise Overloaded(f"{len(self._replies)} calls wait for the engine; try again later")
        reply: Outbox[Any] = Outbox(max_unread=1)
        self._post(message(reply))
        self._replies.add(reply)
        try:
            return await reply.take()
        finally:
            self._replies.discard(reply)

    @property
    def _full(self) -> bool:
        """True while the largest allowed number of messages wait."""
        return len(self._inbox) >= self._max_messages

    def _post(self, message: Message) -> None:
        """Put a message into the inbox.

        Raises:
            Overloaded: too many messages wait there.
            Unavailable, InternalError: the engine has stopped or failed.
        """
        if self._ended is not None:
            raise self._ended
        if self._full:
            raise Overloaded(f"{len(self._inbox)} messages wait for the engine, the limit; try again later")
        self._inbox.put(message)

    def _tell(self, message: Message) -> None:
        """Put a message that is never refused, of a kind that each stream sends rarely."""
        if self._ended is None:
            self._inbox.put(message)

    async def _look(self) -> None:
        """End the process if a turn does not end, as where a GPU hangs. Otherwise the event loop would go on
        telling that all is well, and sessions would wait."""
        looks = Looks()
        while not looks.find_stuck(self._turn):  # noqa: ASYNC110 - a stuck thread has no event
            await asyncio.sleep(LOOK_SECONDS)
        logger.error("the engine is stuck: one step does not end; the process ends, to be started again")
        end_at_once()

    def _run(self) -> None:
        error: OutriderError = Unavailable("this replica is shutting down; use another")
        try:
            wait: float | None = 0.0
            turns = itertools.count(1)
            while not self._stopping:
                messages = self._inbox.take(wait)
                if self._broken is not None:
                    raise self._broken
                self._turn = next(turns)
                wait = self.core.turn(messages)
                self._turn = 0
        except Exception as failure:  # the thread's boundary: a caller must not wait for a dead thread
            logger.exception("the engine failed", problem=problem_of(failure))
            error = InternalError("the engine of this replica has failed; its log has the details")
        self._turn = 0
        self._call_on_loop(self._end, error)

    def _end(self, error: OutriderError) -> None:
        """The thread has ended: pass `error` to all waiting calls and streams, and to all later ones."""
        self._ended = error
        for outbox in (*(stream.outbox for stream in self._streams), *self._replies):
            outbox.end(error)
        if self.failure is not None:
            self._on_failure()

    def _call_on_loop(self, call: Callable[[Any], None], argument: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, argument)


class Looks:
    """Looks at an engine, and at how often in a row it was at the same turn."""

    def __init__(self) -> None:
        self._turn = self._count = 0

    def find_stuck(self, turn: int) -> bool:
        """Look at the number of the turn in progress, 0 for none; return whether the engine is stuck."""
        self._count = self._count + 1 if turn and turn == self._turn else 0
        self._turn = turn
        return self._count >= STUCK_LOOKS


def end_process() -> None:
    """End the process, so that its supervisor restarts it: a replica without an engine is useless."""
    os.kill(os.getpid(), signal.SIGTERM)


def end_at_once() -> None:
    """End the process without waiting for anything: a thread that is stuck in native code may never end."""
    sys.stderr.flush()
    os._exit(1)
