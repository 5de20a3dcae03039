"""A gRPC server as every service has it, with a servicer of the tests behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.config import VerifyConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.rpc.channels import error_of, open_channel
from outrider.rpc.serving import GrpcServer

NAME = "outrider.internal.v1.VerifyService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFO = verify_pb2.VerifyServiceGetModelInfoRequest


class Servicer(verify_pb2_grpc.VerifyServiceServicer):
    """Refuses what it reads; notes how its streams end."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()

    async def GetModelInfo(self, request: object, context: object) -> object:  # noqa: N802
        """See the proto."""
        return verify_pb2.VerifyServiceGetModelInfoResponse()

    async def Verify(self, requests: Any, context: object) -> AsyncIterator[object]:  # noqa: N802
        """See the proto."""
        self.entered.set()
        try:
            async for _ in requests:
                yield verify_pb2.VerifyResponse()
        finally:
            self.ended.set()


class WritingServicer(Servicer):
    """The other style: a coroutine that reads and writes."""

    async def Verify(self, requests: object, context: Any) -> None:  # noqa: N802
        """See the proto."""
        self.entered.set()
        while await context.read() is not grpc.aio.EOF:
            await context.write(verify_pb2.VerifyResponse())
        raise InvalidRequest("propose.tokens", "enough")


@asynccontextmanager
async def serving(
    servicer: Servicer | None = None, **settings: Any
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    """A started server and a channel to it; the door is still closed."""
    server = GrpcServer(VerifyConfig(**settings), [NAME])
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer or Servicer(), server.server)
    await server.start()
    try:
        async with open_channel(server.endpoint) as channel:
            yield server, channel
    finally:
        await server.stop()


async def health(channel: grpc.aio.Channel, name: str = "") -> int:
    """What health says about a name."""
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


async def watch(channel: grpc.aio.Channel, name: str) -> AsyncIterator[int]:
    """What health says about a name, from now on."""
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=name)
    ):
        yield int(answer.status)


async def failure(call: Awaitable[object]) -> OutriderError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value)


async def read_to_end(stream: Any) -> None:
    """Read and forget."""
    while await stream.read() is not grpc.aio.EOF:
        pass
