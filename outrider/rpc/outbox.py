"""What an engine thread has for the event loop: events of a session, answers to a call.

The thread announces, which counts and gives a delivery; the event loop carries deliveries out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from outrider.errors import OutriderError

CONTROL_EVENTS = 4
"""Opened, closed and an error of either side may stand in an outbox beside what its bound counts."""

Event = TypeVar("Event")
Delivery: TypeAlias = tuple[Callable[[Any], None], object]
"""To be called with its argument on the event loop."""
Deliver: TypeAlias = Callable[[Sequence[Delivery]], None]
"""Carries deliveries to the event loop; called by the engine thread."""


class Outbox(Generic[Event]):
    """Events of one session on their way to its stream.

    The engine makes nothing more for a session whose outbox is full, and `on_room` is called when it no
    longer is. Each of the two counters has one writer, so that the engine reads them without a lock.
    """

    def __init__(self, max_unread: int, on_room: Callable[[], None]) -> None:
        self._max_unread = max_unread
        self._on_room = on_room
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue(max_unread + CONTROL_EVENTS)
        self._announced = 0
        self._taken = 0

    @property
    def full(self) -> bool:
        """True when the reader is so slow that nothing more should be made for it."""
        return self._announced - self._taken >= self._max_unread

    def announce(self, event: Event | OutriderError) -> Delivery:
        """Count an event, or the error that ends the session; the delivery puts it (engine thread)."""
        self._announced += 1
        return self._events.put_nowait, event

    def end(self, last: Event | BaseException) -> None:
        """Let the reader have a last event, or an error, after what is there already (event loop)."""
        self._events.put_nowait(last)

    async def take(self) -> Event:
        """The next event; errors are raised (event loop)."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        self._taken += 1
        # Looked at after the count: an engine that still saw a full outbox is always woken.
        if self._announced - self._taken == self._max_unread - 1:
            self._on_room()
        return event


@dataclass(slots=True, eq=False)
class Stream(Generic[Event]):
    """One open stream, as both sides see it; each of the two counters has one writer."""

    id: int
    outbox: Outbox[Event]
    sent: int = 0
    """Messages of which there may be many, put into the inbox (event loop)."""
    absorbed: int = 0
    """Those that the core has taken (engine thread)."""

    @property
    def pending(self) -> int:
        """Those that wait for the engine."""
        return self.sent - self.absorbed


@dataclass(slots=True, eq=False)
class Reply:
    """A future of the event loop that the engine thread answers by a delivery."""

    future: asyncio.Future[Any]

    def answer(self, result: object) -> Delivery:
        """Deliver a result, or an error to raise (engine thread)."""
        return self.settle, result

    def settle(self, result: object) -> None:
        """Let the caller have a result, or an error to raise (event loop)."""
        if self.future.done():  # the caller has gone
            return
        if isinstance(result, OutriderError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def deliver(deliveries: Iterable[Delivery]) -> None:
    """Hand everything out (event loop)."""
    for receive, argument in deliveries:
        receive(argument)
