"""An engine's thread on the virtual clock: a fiber with an inbox, and outboxes that are never full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from outrider.rpc.queues import Delivery, Outbox
from simulator.timeline import Doorbell, Fiber, Timeline

Message = TypeVar("Message")


class EngineFiber(Generic[Message]):
    """Runs a core's turns; a message wakes it after `wake_seconds`."""

    def __init__(
        self, timeline: Timeline, turn: Callable[[Sequence[Message]], float | None], wake_seconds: float
    ) -> None:
        self._timeline = timeline
        self._turn = turn
        self._wake_seconds = wake_seconds
        self._inbox: list[Message] = []
        self._bell = Doorbell(timeline)
        timeline.at(0.0, Fiber(self._run).resume)

    def post(self, message: Message) -> None:
        """Append a message to the inbox."""
        self._inbox.append(message)
        self._timeline.after(self._wake_seconds, self._bell.ring)

    def _run(self) -> None:
        """The engine thread's loop."""
        while True:
            messages, self._inbox = self._inbox, []
            self._bell.wait(self._turn(messages))


class ReadyOutbox(Outbox[Any]):
    """Hands events to an event loop that is never behind."""

    def __init__(self, receive: Callable[[Any], None]) -> None:
        super().__init__(max_unread=1, on_room=lambda: None)
        self._receive = receive

    @property
    def full(self) -> bool:
        """See Outbox."""
        return False

    def announce(self, event: object) -> Delivery:
        """See Outbox."""
        return self._receive, event
