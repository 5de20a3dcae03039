"""The server: health that tells the truth, the door, both handler styles, drain, TLS, malformed bytes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from outrider.config import VerifyConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import ConfigError, Draining, Flood, InvalidRequest, Unavailable
from outrider.rpc import interceptors
from outrider.rpc.channels import error_of, open_channel
from outrider.rpc.health import NAME as HEALTH
from outrider.rpc.interceptors import ServiceInterceptor
from outrider.rpc.serving import GrpcServer
from outrider.rpc.tls import client_certificates
from tests.certificates import self_signed
from tests.unit.rpc.served import (
    INFO,
    NAME,
    NOT_SERVING,
    SERVING,
    Servicer,
    WritingServicer,
    failure,
    health,
    read_to_end,
    serving,
)


async def test_calls_are_refused_until_loaded() -> None:
    """Before a model is there, calls of every kind end with Unavailable and a time to come back."""
    async with serving() as (_, channel):
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        for call in (stub.GetModelInfo(INFO()), stub.Verify().read()):
            error = await failure(call)
            assert type(error) is Unavailable
            assert error.retry_after == 1.0


async def test_drain_finishes_running_sessions_and_refuses_new_ones() -> None:
    """An open stream goes on and its watcher sees NOT_SERVING, while a new call is told to go elsewhere."""
    running = 1
    async with serving(grace_seconds=10) as (server, channel):
        server.set_serving(True)
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stream = stub.Verify()
        await stream.write(verify_pb2.VerifyRequest())
        await stream.read()
        drained = asyncio.create_task(server.drain(lambda: running))
        assert (await watch.read()).status == NOT_SERVING
        assert type(await failure(stub.GetModelInfo(INFO()))) is Draining
        await stream.write(verify_pb2.VerifyRequest())
        assert await stream.read() == verify_pb2.VerifyResponse()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        running = 0
        await drained


def test_a_drain_refuses_all_but_what_helps_to_end_it() -> None:
    """Methods that are named are served until the end; before the service serves, they are refused too."""
    interceptor = ServiceInterceptor(["a.Service"], Unavailable("loading"), ["Fetch"])
    refuses = interceptor._refuses
    for method in ("/a.Service/Fetch", "/a.Service/Open"):
        assert refuses(method, Unavailable("loading"))
        assert not refuses(method.replace("a.", "other."), Unavailable("loading"))
    assert refuses("/a.Service/Open", Draining("going"))
    assert not refuses("/a.Service/Fetch", Draining("going"))


async def test_drain_gives_up_after_the_grace_period() -> None:
    """A session that never ends is cancelled, and what it held is released."""
    servicer = Servicer()
    async with serving(servicer, grace_seconds=0.05) as (server, channel):
        server.set_serving(True)
        stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        await stream.write(verify_pb2.VerifyRequest())
        await servicer.entered.wait()
        await server.drain(lambda: 1)
        await servicer.ended.wait()
        assert isinstance(await failure(read_to_end(stream)), Unavailable)


async def test_cancelled_calls_release_what_they_hold() -> None:
    """A client that goes away ends the handler, which is no error to report."""
    servicer = Servicer()
    async with serving(servicer) as (server, channel):
        server.set_serving(True)
        stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        await stream.write(verify_pb2.VerifyRequest())
        await servicer.entered.wait()
        with capture_logs() as lines:
            stream.cancel()
            await servicer.ended.wait()
            await health(channel)
    assert lines == []


async def test_handlers_that_read_and_write_get_statuses_too() -> None:
    """The coroutine style of a stream works behind the interceptor and ends with its own error."""
    async with serving(WritingServicer()) as (server, channel):
        server.set_serving(True)
        stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        await stream.write(verify_pb2.VerifyRequest())
        assert await stream.read() == verify_pb2.VerifyResponse()
        await stream.done_writing()
        error = await failure(stream.read())
        assert isinstance(error, InvalidRequest)
        assert error.field == "propose.tokens"


class Held:
    """Something large that a handler has in its hands."""


class HoldingServicer(Servicer):
    """Refuses with something large in its hands."""

    held: weakref.ref[Held] | None = None

    async def GetModelInfo(self, request: object, context: object) -> object:  # noqa: N802
        """See the proto."""
        large = Held()
        self.held = weakref.ref(large)
        try:
            raise KeyError(large)
        except KeyError as error:
            raise InvalidRequest("field", "is wrong") from error


async def test_a_refused_call_keeps_nothing() -> None:
    """What the handler had is free with the answer, not with the next garbage collection."""
    servicer = HoldingServicer()
    async with serving(servicer) as (server, channel):
        server.set_serving(True)
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        gc.disable()
        try:
            assert isinstance(await failure(stub.GetModelInfo(INFO())), InvalidRequest)
            async with asyncio.timeout(30):
                while servicer.held is None or servicer.held() is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_bytes_that_are_no_message_are_the_callers_mistake() -> None:
    """Garbage ends its own call with INVALID_ARGUMENT; the service goes on."""
    async with serving() as (server, channel):
        server.set_serving(True)
        unary = channel.unary_unary(f"/{NAME}/GetModelInfo")
        stream = channel.stream_stream(f"/{NAME}/Verify")()
        await stream.write(b"\xff\xff")
        for error in (await failure(unary(b"\xff\xff")), await failure(stream.read())):
            assert isinstance(error, InvalidRequest)
        await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(INFO())


@pytest.mark.parametrize("method", [f"/{NAME}/GetModelInfo", f"/{HEALTH}/Check", f"/{HEALTH}/Watch"])
async def test_calls_without_their_request_are_answered(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once if no request can come any more, and after a while if none comes."""
    monkeypatch.setattr(interceptors, "FIRST_SECONDS", 0.05)
    async with serving() as (server, channel):
        server.set_serving(True)
        ended, silent = channel.stream_stream(method)(), channel.stream_stream(method)()
        await ended.done_writing()
        error = await failure(ended.read())
        assert (type(error), str(error)) == (InvalidRequest, "message: is missing; send one")
        assert "message: none came within" in str(await failure(silent.read()))


async def test_reflection_has_to_be_asked_for() -> None:
    """Without the setting, nobody is told what there is."""
    async with serving() as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ServerReflectionInfo().read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_callers_send_no_more_than_they_may() -> None:
    """A message above max_request_mb ends its own call, and so do headers above the limit.

    The same call would be refused again, so neither is an error that clients try again after.
    """
    async with serving(max_request_mb=1) as (server, channel):
        server.set_serving(True)
        call = channel.unary_unary(f"/{NAME}/GetModelInfo")
        for request, metadata in ((b"x" * (1 << 20 | 1), ()), (b"", (("long", "x" * 20_000),))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert isinstance(error_of(caught.value), InvalidRequest | Flood)
        await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(INFO())


async def test_limits_may_be_larger_than_grpc_can_count() -> None:
    """Messages of more than 2 GiB, or connections of more than 24 days, may be allowed: it is no error."""
    async with serving(max_request_mb=4096, max_connection_seconds=1e9) as (server, channel):
        server.set_serving(True)
        await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(INFO())


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_refused(compression: grpc.Compression) -> None:
    """A message far below max_request_mb could be unpacked to far above it."""
    async with serving() as (server, channel):
        server.set_serving(True)
        packed = grpc.aio.insecure_channel(server.endpoint, compression=compression)
        async with packed:
            with pytest.raises(grpc.aio.AioRpcError, match="is disabled") as caught:
                await packed.unary_unary(f"/{NAME}/GetModelInfo")(b"x" * 1000)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(INFO())


async def test_replicas_may_not_compress_what_they_send() -> None:
    """A draft's message within its limit could be unpacked to a thousand times as much."""
    replica = grpc.aio.server(compression=grpc.Compression.Gzip)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Servicer(), replica)
    port = replica.add_insecure_port("127.0.0.1:0")
    await replica.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
            await stream.write(verify_pb2.VerifyRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="is disabled"):
                await stream.read()
    finally:
        await replica.stop(0)


async def test_reflection_lists_the_service() -> None:
    """Generic clients can find out what is served."""
    async with serving(reflection=True) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await call.read()).list_services_response.service
        call.cancel()
        assert {service.name for service in listed} >= {NAME, "grpc.health.v1.Health"}


@pytest.mark.parametrize("setting", ["port", "health_port"])
async def test_a_taken_port_is_a_setting_to_change(setting: str) -> None:
    """Two servers never share a port by accident."""
    async with serving() as (server, _):
        second = GrpcServer(VerifyConfig(**{setting: server.port}), [NAME])
        with pytest.raises(ConfigError, match=f"^{setting}: cannot listen on 127.0.0.1:{server.port}"):
            await second.start()
        await second.stop()


async def test_mutual_tls_lets_in_only_who_has_a_certificate(tmp_path: Path) -> None:
    """With an authority set, a client with its certificate is served; one without is not, nor plaintext, and
    the client turns away from a server whose certificate is for another name."""
    pair = self_signed(tmp_path)
    files = {"tls_cert": pair["cert"], "tls_key": pair["key"], "tls_ca": pair["cert"]}
    own = client_certificates(pair["cert"], pair["cert"], pair["key"])
    async with serving(**files) as (server, plaintext):
        async with open_channel(server.endpoint, certificates=own) as known:
            assert await health(known, "liveness") == SERVING
        async with open_channel(server.endpoint, certificates=own, tls_name="another") as elsewhere:
            assert type(await failure(health(elsewhere, "liveness"))) is Unavailable
        none = client_certificates(pair["cert"])
        async with open_channel(server.endpoint, certificates=none) as unknown:
            assert type(await failure(health(unknown))) is Unavailable
        assert type(await failure(health(plaintext))) is Unavailable


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tls_cert": "cert.pem"}, "tls_key: must be set"),
        ({"tls_key": "key.pem"}, "tls_cert: must be set"),
        ({"tls_ca": "ca.pem"}, "tls_ca: needs"),
        ({"tls_cert": "no.pem", "tls_key": "no.pem"}, "tls_cert: cannot read 'no.pem'"),
    ],
)
async def test_wrong_tls_settings_stop_the_process_at_start(settings: dict[str, str], named: str) -> None:
    """A half-configured server never falls back to plaintext."""
    with pytest.raises(ConfigError, match=named):
        GrpcServer(VerifyConfig(**settings), [NAME])
