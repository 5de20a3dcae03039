"""A verify replica on the virtual clock: the service's own `VerifyCore`, its thread a fiber."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from outrider.protocol.messages import OpenVerify, TokenBlock
from outrider.rpc.queues import Stream, deliver
from outrider.telemetry.instruments import VerifyInstruments
from simulator.engine_fiber import EngineFiber, ReadyOutbox
from simulator.network import Host
from simulator.target import ScriptedRunner
from simulator.timeline import Timeline
from verify_service.core import CoreSettings, VerifyCore
from verify_service.mailbox import (
    MAX_PENDING_BLOCKS,
    Close,
    Event,
    Message,
    Open,
    Propose,
    VerifyStream,
)
from verify_service.speculation.cost_model import CostModel

Receive = Callable[[Event | BaseException], None]


class SimulatedVerifyReplica:
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
        core = VerifyCore(
            runner,
            cost,
            settings,
            VerifyInstruments(CollectorRegistry()),
            deliver,
            timeline.clock,
            timeline.clock,
            runner.drafting,
        )
        self._ids = itertools.count(1)
        self._engine: EngineFiber[Message] = EngineFiber(timeline, core.turn, wake_seconds)

    def open(self, opening: OpenVerify, receive: Receive) -> VerifyStream:
        """Open a session; `receive` gets its events."""
        stream = Stream(next(self._ids), ReadyOutbox(receive))
        self._engine.post(Open(stream, opening))
        return stream

    def propose(self, stream: VerifyStream, block: TokenBlock) -> None:
        """Offer candidates."""
        if stream.pending < MAX_PENDING_BLOCKS:
            stream.sent += 1
            self._engine.post(Propose(stream, block, self._timeline.now))

    def close(self, stream: VerifyStream) -> None:
        """End a session."""
        self._engine.post(Close(stream))
