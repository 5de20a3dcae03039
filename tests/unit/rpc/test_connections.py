"""Connections: options that gRPC knows, their number, and their age."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from outrider.config import VerifyConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.rpc import channels
from outrider.rpc import serving as server_module
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from tests.unit.rpc.served import NAME, SERVING, Servicer, health, serving


def test_grpc_has_every_option_that_is_set() -> None:
    """gRPC ignores an option that it does not know, so each of ours is looked up in the installed library."""
    library = Path(cygrpc.__file__).read_bytes()
    config = VerifyConfig(max_connection_seconds=1)
    options = [*server_module._options(config), *channels.OPTIONS]
    assert len(options) > 10
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond the bound, and those that say nothing, are closed; others are served after that."""
    monkeypatch.setattr(server_module, "most_connections", lambda: 3)
    monkeypatch.setattr(server_module, "HANDSHAKE_MS", 500)
    server = GrpcServer(VerifyConfig(), [NAME])
    await server.start()
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
    await asyncio.gather(*(_closed(reader) for reader, _ in silent))
    async with open_channel(server.endpoint) as channel:
        assert await health(channel, "liveness") == SERVING
    for _, writer in silent:
        writer.close()
    await server.stop()


async def test_calls_take_turns_where_there_are_several_servers() -> None:
    """A name with several addresses spreads its calls over them; the first alone would have them all else."""
    async with serving(Servicer()) as (one, _), serving(Servicer()) as (other, _):
        one.set_serving(True)
        addresses = f"ipv4:{one.endpoint},{other.endpoint}"
        async with open_channel(addresses) as channel:
            await channel.channel_ready()
            found = {await health(channel, "readiness") for _ in range(40)}
    assert len(found) == 2, "both were asked: the one that serves, and the other"


async def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment names a proxy, services still reach each other."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serving(Servicer()) as (_, channel):
        assert await health(channel, "liveness") == SERVING


async def test_an_old_connection_ends_after_its_calls() -> None:
    """A stream that is older than a connection may be goes on; the next call has a new connection."""
    async with serving(Servicer(), max_connection_seconds=0.2) as (server, channel):
        server.set_serving(True)
        stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        await stream.write(verify_pb2.VerifyRequest())
        assert await stream.read() == verify_pb2.VerifyResponse()
        ready = grpc.ChannelConnectivity.READY
        await asyncio.wait_for(channel.wait_for_state_change(ready), 10)
        await stream.write(verify_pb2.VerifyRequest())
        assert await stream.read() == verify_pb2.VerifyResponse()
        assert await health(channel, "readiness") == SERVING


async def _closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed the connection."""
    with suppress(ConnectionError):
        await reader.read()
