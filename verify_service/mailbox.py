"""What crosses between the event loop and the engine thread, and in which queues.

Into the engine: one inbox for all sessions. A stream holds at most MAX_PENDING_BLOCKS token blocks in
it (further ones are dropped: they are only proposals); every other message is one per stream or per
unary call. Out of it: one outbox per session, which the engine does not fill beyond its bound.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from outrider.allowance import Allowance
from outrider.errors import OutriderError
from outrider.messages import KvHandle, Opened, OpenVerify, TokenBlock, Verdict

MAX_PENDING_BLOCKS = 128
"""Token blocks of one session that the engine has not looked at yet."""
CONTROL_EVENTS = 4
"""Opened, closed and an error of either side may stand in an outbox beside the verdicts."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over; `handle` when its keys and values were kept."""

    handle: KvHandle | None = None


Event: TypeAlias = Opened | Verdict | Closed | BaseException
Delivery: TypeAlias = tuple[Callable[[Any], None], object]
"""To be called with its argument on the event loop."""


class Outbox:
    """Events of one session on their way to its stream.

    The engine thread announces an event, the event loop puts and takes it. The two counters have one
    writer each, so that the engine may read the number of unread events without a lock.
    """

    def __init__(self, max_unread: int, on_room: Callable[[], None]) -> None:
        self._max_unread = max_unread
        self._on_room = on_room
        self._events: asyncio.Queue[Event] = asyncio.Queue(max_unread + CONTROL_EVENTS)
        self._announced = 0
        self._taken = 0

    @property
    def full(self) -> bool:
        """True when the reader is so slow that nothing more should be made for it."""
        return self._announced - self._taken >= self._max_unread

    def announce(self, event: Event) -> Delivery:
        """Count an event; the delivery puts it (engine thread)."""
        self._announced += 1
        return self._events.put_nowait, event

    def fail(self, error: BaseException) -> None:
        """Let the reader have an error after what is there already (event loop)."""
        self._events.put_nowait(error)

    async def take(self) -> Opened | Verdict | Closed:
        """The next event; errors are raised (event loop)."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        was_full = self.full
        self._taken += 1
        if was_full:
            self._on_room()
        return event


@dataclass(slots=True, eq=False)
class Stream:
    """One open stream, as both sides see it; the two counters have one writer each."""

    id: int
    outbox: Outbox
    sent: int = 0
    """Blocks put into the inbox (event loop)."""
    absorbed: int = 0
    """Blocks taken out of it (engine thread)."""
    allowance: Allowance = field(default_factory=Allowance.full)
    """What the orchestrator may still send (event loop)."""

    @property
    def crowded(self) -> bool:
        """True when a further block is dropped."""
        return self.sent - self.absorbed >= MAX_PENDING_BLOCKS


@dataclass(slots=True)
class Reply:
    """A future of the event loop that the engine thread answers by a delivery."""

    future: asyncio.Future[Any]

    def answer(self, result: object) -> Delivery:
        """Deliver a result, or an error to raise."""
        return self._settle, result

    def _settle(self, result: object) -> None:
        if self.future.done():  # the caller has gone
            return
        if isinstance(result, OutriderError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session; the outbox gets `Opened` or an error."""

    stream: Stream
    opening: OpenVerify


@dataclass(frozen=True, slots=True)
class Propose:
    """A token block for a session; `arrived` in seconds of the engine's clock."""

    stream: Stream
    block: TokenBlock
    arrived: float


@dataclass(frozen=True, slots=True)
class Close:
    """End a session; the outbox gets `Closed`. Unknown sessions are ended already."""

    stream: Stream
    keep: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """Give up what a handle holds."""

    handle: KvHandle
    reply: Reply


@dataclass(frozen=True, slots=True)
class ForkKv:
    """Make a second handle."""

    handle: KvHandle
    reply: Reply


Message: TypeAlias = Open | Propose | Close | ReleaseKv | ForkKv


@dataclass(slots=True)
class Inbox:
    """Messages to the engine thread, which sleeps here when it has nothing to do."""

    _messages: list[Message] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _woken: bool = False

    def put(self, message: Message) -> None:
        """Append a message and wake the engine."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def wake(self) -> None:
        """Make the engine look around though there is no message."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, wait: float | None) -> list[Message]:
        """All messages; without any, waits up to `wait` seconds (None: for ever) for one or a `wake`."""
        with self._changed:
            if not self._messages and not self._woken:
                self._changed.wait(wait)
            self._woken = False
            messages, self._messages = self._messages, []
            return messages


def deliver(deliveries: Iterable[Delivery]) -> None:
    """Hand everything out (event loop)."""
    for receive, argument in deliveries:
        receive(argument)
