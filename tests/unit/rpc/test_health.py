"""Health that tells the truth, to few watchers at a time, and to probes without a certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.internal.v1 import verify_pb2_grpc
from outrider.protocol.errors import Flood, Overloaded
from outrider.rpc import health as health_module
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from tests.certificates import self_signed
from tests.unit.rpc.served import INFO, NAME, NOT_SERVING, SERVING, failure, health, serving, watch


async def test_health_follows_the_lifecycle() -> None:
    """Loading and draining are NOT_SERVING under every name but liveness, which is up from the start."""
    async with serving() as (server, channel):
        names = ("", NAME, "readiness")
        assert [await health(channel, name) for name in names] == [NOT_SERVING] * 3
        assert await health(channel, "liveness") == SERVING
        server.set_serving(True)
        assert [await health(channel, name) for name in names] == [SERVING] * 3


async def test_a_watcher_that_leaves_takes_nobody_with_it() -> None:
    """Who watches health hears of every change, also when another one who watched has gone."""
    async with serving() as (server, channel), open_channel(server.endpoint) as other:
        staying, leaving = watch(channel, NAME), watch(other, NAME)
        assert [await anext(staying), await anext(leaving)] == [NOT_SERVING] * 2
        await other.close()
        for serving_now, status in ((True, SERVING), (False, NOT_SERVING)):
            server.set_serving(serving_now)
            assert await anext(staying) == status


@pytest.mark.parametrize("port", [-1, 0])
async def test_watchers_of_health_are_few(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Beyond the limit a watch is refused, on both ports; checks go on, and one that ends makes room."""
    monkeypatch.setattr(health_module, "MAX_WATCHES", 2)
    async with serving(health_port=port) as (server, own):
        channel = own if port else _probe(server)
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for one in watches:
            await one.read()
        error = await failure(stub.Watch(health_pb2.HealthCheckRequest()).read())
        assert type(error) is Overloaded
        assert await health(channel, "liveness") == SERVING
        watches[0].cancel()
        while True:  # the server hears of it a moment later
            again = stub.Watch(health_pb2.HealthCheckRequest())
            try:
                await again.read()
            except grpc.aio.AioRpcError:
                continue
            break
        await channel.close()


async def test_health_of_a_name_that_is_none() -> None:
    """A watch would hold it for as long as it lasts."""
    async with serving() as (_, channel):
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="x" * 257))
        assert (await failure(call.read())).field == "service"


@pytest.mark.parametrize("name", ["grpc.health.v1.Health", "grpc.health.v1.Health/Check"])
async def test_a_response_larger_than_its_kind_may_be_is_a_flood(name: str) -> None:
    """The limit is the method's own; what is within it comes."""
    async with serving() as (server, _):
        async with open_channel(server.endpoint, response_bytes={name: 2}) as channel:
            assert await health(channel) == NOT_SERVING
        async with open_channel(server.endpoint, response_bytes={name: 1}) as channel:
            assert type(await failure(health(channel))) is Flood


async def test_health_of_an_unknown_service() -> None:
    """A check of a name that no service has is NOT_FOUND; a watch says so and goes on."""
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert await anext(watch(channel, "nobody")) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_probes_need_no_certificate(tmp_path: Path) -> None:
    """The health port answers in plaintext what the TLS port would, before, while and after serving, and
    nothing else."""
    pair = self_signed(tmp_path)
    files = {"tls_cert": pair["cert"], "tls_key": pair["key"], "tls_ca": pair["cert"]}
    async with serving(**files, health_port=0) as (server, _), _probe(server) as probe:
        assert await health(probe, "liveness") == SERVING
        assert await health(probe, "readiness") == NOT_SERVING
        server.set_serving(True)
        assert await health(probe, "readiness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await verify_pb2_grpc.VerifyServiceStub(probe).GetModelInfo(INFO())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        draining = asyncio.create_task(server.drain(lambda: 1))
        await asyncio.sleep(0)
        assert await health(probe, "readiness") == NOT_SERVING
        draining.cancel()


def _probe(server: GrpcServer) -> grpc.aio.Channel:
    """A plaintext channel to the health port."""
    return open_channel(f"127.0.0.1:{server.health_port}")
