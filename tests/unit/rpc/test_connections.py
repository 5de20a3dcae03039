"""Connections: options that gRPC knows, their number, and silence."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from outrider.config import VerifyConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.rpc import channels
from outrider.rpc import serving as server_module
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from tests.unit.rpc.served import NAME, SERVING, Servicer, health, run, serving

SILENCE_SECONDS = 4.5 * channels.KEEPALIVE_MS / 1000
"""A client that pings too often is cut off at its third ping at the latest."""


def test_grpc_has_every_option_that_is_set() -> None:
    """gRPC ignores an option that it does not know, so each of ours is looked up in the installed library."""
    library = Path(cygrpc.__file__).read_bytes()
    options = [*server_module._options(VerifyConfig()), *channels._options(64)]
    assert len(options) > 10
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond the bound, and those that say nothing, are closed; others are served after that."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(server_module, "HANDSHAKE_MS", 500)

    async def scenario() -> None:
        server = GrpcServer(VerifyConfig(), [NAME])
        await server.start()
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        await asyncio.gather(*(_closed(reader) for reader, _ in silent))
        async with open_channel(server.endpoint) as channel:
            assert await health(channel, "liveness") == SERVING
        for _, writer in silent:
            writer.close()
        await server.stop()

    run(scenario)


async def _closed(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed the connection."""
    with suppress(ConnectionError):
        await reader.read()


@pytest.mark.slow
def test_a_silent_stream_stays_open() -> None:
    """A stream on which nobody says anything for more than a minute, keepalives on, works afterwards."""

    async def scenario() -> None:
        async with serving(Servicer()) as (server, channel):
            server.set_serving(True)
            stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
            await stream.write(verify_pb2.VerifyRequest())
            assert await stream.read() == verify_pb2.VerifyResponse()
            await asyncio.sleep(SILENCE_SECONDS)
            await stream.write(verify_pb2.VerifyRequest())
            assert await stream.read() == verify_pb2.VerifyResponse()

    asyncio.run(scenario())
