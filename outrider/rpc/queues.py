"""Queues between the event loop and an engine thread: one inbox for all, and one outbox for each session.

The thread counts an event when it announces it. The event loop puts the event into the outbox when it carries
out the delivery.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from outrider.protocol.errors import OutriderError

Message = TypeVar("Message")
Event = TypeVar("Event")
Delivery: TypeAlias = tuple[Callable[[Any], None], object]
"""A function and its argument, to be called on the event loop."""
Deliver: TypeAlias = Callable[[Sequence[Delivery]], None]
"""Carries deliveries to the event loop; called by the engine thread."""


class Inbox(Generic[Message]):
    """Messages to the engine thread, which sleeps in `take` when it has nothing to do.

    The inbox has no limit of its own: callers of `put` have to check `len` first.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._changed = threading.Condition()
        self._woken = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Append a message and wake the engine."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def wake(self) -> None:
        """Wake the engine without a message."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def take(self, wait: float | None) -> list[Message]:
        """All messages; if there are none, wait up to `wait` seconds (None: for ever) for one or a `wake`."""
        with self._changed:
            if not self._messages and not self._woken and wait != 0.0:
                self._changed.wait(wait)
            self._woken = False
            messages, self._messages = self._messages, []
            return messages


class Outbox(Generic[Event]):
    """Events of one session on their way to its stream, or the answer to one call.

    The engine computes nothing more for a session whose outbox is full; the events of its last step, and the
    end, are added all the same. `on_room` is called when there is room again. Each of the two counters has
    one writer, so the engine reads them without a lock.
    """

    def __init__(self, max_unread: int, on_room: Callable[[], None] = lambda: None) -> None:
        self._max_unread = max_unread
        self._on_room = on_room
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._announced = 0
        self._taken = 0

    @property
    def full(self) -> bool:
        """True if `max_unread` or more events are unread, so that the engine should compute no more."""
        return self._announced - self._taken >= self._max_unread

    def announce(self, event: Event | OutriderError) -> Delivery:
        """Count an event, or an error to raise; returns the delivery that puts it here (engine thread)."""
        self._announced += 1
        return self._events.put_nowait, event

    def end(self, last: Event | BaseException) -> None:
        """Put a last event, or an error, after the others (event loop)."""
        self._events.put_nowait(last)

    async def take(self) -> Event:
        """The next event; errors are raised (event loop)."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        self._taken += 1
        # Checked after counting, so that an engine that still saw a full outbox is always woken.
        if self._announced - self._taken == self._max_unread - 1:
            self._on_room()
        return event


@dataclass(slots=True, eq=False)
class Stream(Generic[Event]):
    """One open stream, as both sides see it; each of the two counters has one writer."""

    id: int
    outbox: Outbox[Event]
    sent: int = 0
    """Number of the stream's messages of frequent kinds that were put into the inbox (event loop)."""
    absorbed: int = 0
    """Number of them that the core has taken (engine thread)."""

    @property
    def pending(self) -> int:
        """Number of them that wait for the engine."""
        return self.sent - self.absorbed


def deliver(deliveries: Iterable[Delivery]) -> None:
    """Carry out all deliveries (event loop)."""
    for receive, argument in deliveries:
        receive(argument)
