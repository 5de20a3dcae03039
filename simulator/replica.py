"""A replica on the virtual clock: the service's own core, in a fiber, with outboxes that are never full."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from outrider.rpc.queues import Delivery, Outbox, Stream
from simulator.devices import StepTotals
from simulator.network import Host
from simulator.timeline import Doorbell, Fiber, Timeline


class SimulatedReplica:
    """Runs the turns of a core. `host` is the replica's event loop, which calls the methods.

    `totals` are sums over the engine's steps. A message wakes the thread after `wake_seconds`.
    """

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        host: Host,
        turn: Callable[[Sequence[Any]], float | None],
        totals: StepTotals,
        wake_seconds: float,
    ) -> None:
        self.name = name
        self.host = host
        self.totals = totals
        self._timeline = timeline
        self._turn = turn
        self._wake_seconds = wake_seconds
        self._inbox: list[Any] = []
        self._bell = Doorbell(timeline)
        self._ids = itertools.count(1)
        timeline.at(0.0, Fiber(self._run).resume)

    def stream(self, receive: Callable[[Any], None]) -> Stream[Any]:
        """A new session's stream; `receive` gets its events, and the error that ends it."""
        return Stream(next(self._ids), ReadyOutbox(receive))

    def post(self, message: Any) -> None:
        """Put a message of the service's mailbox into the inbox."""
        self._inbox.append(message)
        self._timeline.after(self._wake_seconds, self._bell.ring)

    def _run(self) -> None:
        """The engine thread's loop."""
        while True:
            messages, self._inbox = self._inbox, []
            self._bell.wait(self._turn(messages))


class ReadyOutbox(Outbox[Any]):
    """Hands events to an event loop that always keeps up."""

    def __init__(self, receive: Callable[[Any], None]) -> None:
        super().__init__(max_unread=1)
        self._receive = receive

    @property
    def full(self) -> bool:
        """See Outbox."""
        return False

    def announce(self, event: object) -> Delivery:
        """See Outbox."""
        return self._receive, event
