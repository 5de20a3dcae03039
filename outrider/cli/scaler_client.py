"""Asks an orchestrator how many drafts are needed, over the contract by which KEDA asks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc

from outrider.channels import error_of
from outrider.keda import externalscaler_pb2 as pb2
from outrider.keda import externalscaler_pb2_grpc

ASK_SECONDS = 2.0
REASONS = ("outrider_draft_sessions_wanted", "outrider_draft_sessions_per_replica")


@dataclass(frozen=True, slots=True)
class Reading:
    """What the orchestrator says."""

    replicas: float
    """Needed, not rounded."""
    sessions: float
    """That want drafts."""
    sessions_per_replica: float
    """That one replica is taken to serve well; 0: not known."""


async def ask(channel: grpc.aio.Channel) -> Reading:
    """The metric of the scaler in units of its target, and the numbers that explain it.

    Raises:
        OutriderError: the orchestrator does not answer.
    """
    stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)  # type: ignore[no-untyped-call]
    scaled = pb2.ScaledObjectRef(name="draft")

    async def value(metric: str) -> float:
        request = pb2.GetMetricsRequest(scaledObjectRef=scaled, metricName=metric)
        answer = await stub.GetMetrics(request, timeout=ASK_SECONDS)
        return math.fsum(one.metricValueFloat for one in answer.metricValues)

    try:
        (spec,) = (await stub.GetMetricSpec(scaled, timeout=ASK_SECONDS)).metricSpecs
        replicas = await value(spec.metricName) / spec.targetSizeFloat
        sessions, per_replica = [await value(name) for name in REASONS]
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None
    return Reading(replicas, sessions, per_replica)
