"""The standard health service, `grpc.health.v1.Health`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from outrider.protocol.errors import InvalidRequest, Overloaded

NAME = "grpc.health.v1.Health"
MAX_WATCHES = 256
"""Most watches that are open at once; a load balancer holds one per backend and client."""
MAX_NAME = 256
"""Most characters of a service's name."""
_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Reports which services are up, once or at every change.

    The asyncio servicer of `grpcio-health-checking` is not used: when one of its watchers ends, it forgets
    the others of the same service, which then are not told of changes any more (seen in 1.81).
    """

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, at every change."""
        self._watches = 0

    def set(self, services: Sequence[str], serving: bool) -> None:
        """Set whether these services are up."""
        self._serving.update(dict.fromkeys(services, serving))
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - gRPC names it
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that was never set."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of this name")
        return _Status(status=self._status(request.service))

    async def Watch(  # noqa: N802 - gRPC names it
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and whenever it has changed; SERVICE_UNKNOWN for a service that was never set.

        Raises:
            Overloaded: the limit of open watches is reached.
            InvalidRequest: the name is too long.
        """
        if len(request.service) > MAX_NAME:
            raise InvalidRequest("service", f"must have at most {MAX_NAME} characters")
        if self._watches >= MAX_WATCHES:
            raise Overloaded(f"{self._watches} watches are open, which is the limit; ask with Check")
        self._watches += 1
        told = None
        try:
            while True:
                changed = self._changed
                if (status := self._status(request.service)) != told:
                    yield _Status(status=status)
                    told = status
                await changed.wait()
        finally:
            self._watches -= 1

    def _status(self, service: str) -> int:
        match self._serving.get(service):
            case None:
                return int(_Status.SERVICE_UNKNOWN)
            case True:
                return int(_Status.SERVING)
            case False:
                return int(_Status.NOT_SERVING)
