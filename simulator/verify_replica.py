"""A verify replica on the virtual clock: the service's own `EngineCore`, its thread a fiber."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from outrider.messages import OpenVerify, TokenBlock
from outrider.telemetry.instruments import VerifyInstruments
from simulator.network import Host
from simulator.target import ScriptedRunner
from simulator.timeline import Doorbell, Fiber, Timeline
from verify_service.core import CoreSettings, EngineCore
from verify_service.cost_model import CostModel
from verify_service.mailbox import Close, Delivery, Event, Message, Open, Outbox, Propose, Stream, deliver

Receive = Callable[[Event], None]


class VerifyReplica:
    """One replica; `host` is its event loop, which calls the methods."""

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        host: Host,
        runner: ScriptedRunner,
        cost: CostModel,
        settings: CoreSettings,
        wake_seconds: float,
    ) -> None:
        self.name = name
        self.host = host
        self.runner = runner
        self.cost = cost
        self._timeline = timeline
        self._wake_seconds = wake_seconds
        self._core = EngineCore(
            runner,
            cost,
            settings,
            VerifyInstruments(CollectorRegistry()),
            self._deliver,
            timeline.clock,
            timeline.clock,
        )
        self._ids = itertools.count(1)
        self._inbox: list[Message] = []
        self._bell = Doorbell(timeline)
        timeline.at(0.0, Fiber(self._run).resume)

    def open(self, opening: OpenVerify, receive: Receive) -> Stream:
        """Open a session; `receive` gets its events."""
        stream = Stream(next(self._ids), EventOutbox(receive))
        self._post(Open(stream, opening))
        return stream

    def propose(self, stream: Stream, block: TokenBlock) -> None:
        """Offer candidates."""
        if not stream.crowded:
            stream.sent += 1
            self._post(Propose(stream, block, self._timeline.now))

    def close(self, stream: Stream) -> None:
        """End a session."""
        self._post(Close(stream))

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        self._timeline.after(self._wake_seconds, self._bell.ring)

    def _run(self) -> None:
        """The engine thread's loop."""
        while True:
            messages, self._inbox = self._inbox, []
            self._bell.wait(self._core.turn(messages))

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        deliver(deliveries)


class EventOutbox(Outbox):
    """Hands events to the replica's event loop, which is never behind."""

    def __init__(self, receive: Receive) -> None:
        super().__init__(max_unread=1, on_room=lambda: None)
        self._receive = receive

    @property
    def full(self) -> bool:
        """See Outbox."""
        return False

    def announce(self, event: Event) -> Delivery:
        """See Outbox."""
        return self._receive, event
