"""The service that KEDA's external scaler asks for the number of draft replicas, and whether there is work.

Calls need no token: KEDA has none to send, and the answers are three numbers about load. A process that
drains still answers, because what it sees of the draft pool is still true. A process that does not know the
replicas yet refuses, because a zero would stop drafts that others use.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict, replace
from typing import Any

import grpc

from orchestrator.observing.draft_load import DraftLoad
from orchestrator.observing.scaler import Demand, Observation, Scaler
from orchestrator.replicas.fleet import Fleet
from outrider.internal.keda import externalscaler_pb2 as pb2
from outrider.internal.keda import externalscaler_pb2_grpc
from outrider.protocol.errors import InvalidRequest, NoReplica, Overloaded
from outrider.telemetry.instruments import DraftPoolInstruments
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
REPLICAS = "outrider_draft_replicas_desired"
SESSIONS = "outrider_draft_sessions_wanted"
PER_REPLICA = "outrider_draft_sessions_per_replica"
MAX_STREAMS = 32
"""Most open calls of StreamIsActive. Each holds only the last answer."""

Context = grpc.aio.ServicerContext[Any, Any]


class ScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Watches the need for drafts, exports it as metrics and serves it to KEDA."""

    def __init__(
        self, scaler: Scaler, fleet: Fleet, load: DraftLoad, instruments: DraftPoolInstruments
    ) -> None:
        self.clock = time.monotonic
        self._scaler = scaler
        self._fleet = fleet
        self._load = load
        self._instruments = instruments
        self._demand = Demand()
        self._change = asyncio.Event()
        self._streams = 0

    def observe(self) -> None:
        """Update the demand; wake the streams when work has come or is over."""
        room = asdict(self._fleet.draft_capacity())
        seen = Observation(wanted=self._load.wanted, totals=replace(self._load.totals), **room)
        was_active, self._demand = self._active, self._scaler.observe(seen, self.clock())
        self._instruments.replicas_desired.set(self._demand.own_replicas)
        self._instruments.per_replica.set(self._demand.sessions_per_replica)
        if self._active is not was_active:
            logger.debug("draft work has come" if self._active else "draft work is over")
            self._change.set()
            self._change = asyncio.Event()

    async def IsActive(  # noqa: N802 - the name on the wire
        self, request: pb2.ScaledObjectRef, context: Context
    ) -> pb2.IsActiveResponse:
        """Whether any session wants drafts."""
        self._refuse_unless_known()
        return pb2.IsActiveResponse(result=self._active)

    async def StreamIsActive(  # noqa: N802 - the name on the wire
        self, request: pb2.ScaledObjectRef, context: Context
    ) -> None:
        """Whether any session wants drafts, now and at every change."""
        self._refuse_unless_known()
        if self._streams >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} streams of StreamIsActive are open; close one or poll IsActive")
        self._streams += 1
        try:
            while True:
                change = self._change
                await context.write(pb2.IsActiveResponse(result=self._active))
                await change.wait()
        finally:
            self._streams -= 1

    async def GetMetricSpec(  # noqa: N802 - the name on the wire
        self, request: pb2.ScaledObjectRef, context: Context
    ) -> pb2.GetMetricSpecResponse:
        """The one metric: a number of replicas, so its target is 1."""
        spec = pb2.MetricSpec(metricName=REPLICAS, targetSize=1, targetSizeFloat=1.0)
        return pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(  # noqa: N802 - the name on the wire
        self, request: pb2.GetMetricsRequest, context: Context
    ) -> pb2.GetMetricsResponse:
        """The number of replicas that all sessions need, or one of the two numbers that it comes from."""
        self._refuse_unless_known()
        demand = self._demand
        values = {
            REPLICAS: demand.all_replicas,
            SESSIONS: demand.sessions,
            PER_REPLICA: demand.sessions_per_replica,
        }
        if request.metricName not in values:
            raise InvalidRequest("metricName", f"must be one of {', '.join(values)}")
        value = values[request.metricName]
        answer = pb2.MetricValue(
            metricName=request.metricName, metricValue=math.ceil(value), metricValueFloat=value
        )
        return pb2.GetMetricsResponse(metricValues=[answer])

    @property
    def _active(self) -> bool:
        return self._demand.all_replicas > 0.0

    def _refuse_unless_known(self) -> None:
        if self._fleet.served is None:
            raise NoReplica("the replicas are not known yet")
