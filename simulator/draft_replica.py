"""A draft replica on the virtual clock: the service's own `DraftCore`, its thread a fiber."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from draft_service.core import DraftCore
from draft_service.mailbox import Close, Commit, DraftStream, Event, Message, Open
from outrider.config import DraftConfig
from outrider.protocol.messages import OpenDraft, Verdict
from outrider.rpc.queues import Stream, deliver
from outrider.telemetry.instruments import DraftInstruments
from simulator.drafter import ScriptedDrafter, TimedLookup
from simulator.engine_fiber import EngineFiber, ReadyOutbox
from simulator.network import Host
from simulator.timeline import Timeline

Receive = Callable[[Event | BaseException], None]


class SimulatedDraftReplica:
    """One replica; `host` is its event loop, which calls the methods."""

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        host: Host,
        drafter: ScriptedDrafter | TimedLookup,
        config: DraftConfig,
        wake_seconds: float,
    ) -> None:
        self.name = name
        self.host = host
        self.drafter = drafter
        self._timeline = timeline
        core = DraftCore(
            drafter,
            config,
            DraftInstruments(CollectorRegistry()),
            deliver,
            clock=timeline.clock,
            wall_ns=lambda: int(timeline.now * 1e9),
        )
        self._ids = itertools.count(1)
        self._engine: EngineFiber[Message] = EngineFiber(timeline, core.turn, wake_seconds)

    def open(self, request: OpenDraft, receive: Receive) -> DraftStream:
        """Open a session; `receive` gets its events."""
        stream = Stream(next(self._ids), ReadyOutbox(receive))
        self._engine.post(Open(stream, request))
        return stream

    def verdict(self, stream: DraftStream, verdict: Verdict) -> None:
        """Tell a session what was committed."""
        self._engine.post(Commit(stream, verdict, self._timeline.now))

    def close(self, stream: DraftStream) -> None:
        """End a session."""
        self._engine.post(Close(stream))
