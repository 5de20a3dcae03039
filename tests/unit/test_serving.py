"""The server: health that tells the truth, the door, both handler styles, drain, TLS, malformed bytes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from outrider import channels
from outrider import health as health_module
from outrider import serving as server_module
from outrider.channels import error_of, open_channel
from outrider.config import VerifyConfig
from outrider.errors import (
    ConfigError,
    Draining,
    Flood,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unavailable,
)
from outrider.serving import GrpcServer
from outrider.v1 import verify_pb2, verify_pb2_grpc
from tests.certificates import self_signed

NAME = "outrider.v1.VerifyService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFO = verify_pb2.VerifyServiceGetModelInfoRequest
SILENCE_SECONDS = 4.5 * channels.KEEPALIVE_MS / 1000
"""A client that pings too often is cut off at its third ping at the latest."""


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
    async with open_channel(server.endpoint) as channel:
        yield server, channel
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


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario with a bound on its time."""
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_health_follows_the_lifecycle() -> None:
    """Loading and draining are NOT_SERVING under every name but liveness, which is up from the start."""

    async def scenario() -> None:
        async with serving() as (server, channel):
            names = ("", NAME, "readiness")
            assert [await health(channel, name) for name in names] == [NOT_SERVING] * 3
            assert await health(channel, "liveness") == SERVING
            server.set_serving(True)
            assert [await health(channel, name) for name in names] == [SERVING] * 3

    run(scenario)


def test_a_watcher_that_leaves_takes_nobody_with_it() -> None:
    """Who watches health hears of every change, also when another one who watched has gone."""

    async def scenario() -> None:
        async with serving() as (server, channel), open_channel(server.endpoint) as other:
            staying, leaving = watch(channel, NAME), watch(other, NAME)
            assert [await anext(staying), await anext(leaving)] == [NOT_SERVING] * 2
            await other.close()
            for serving_now, status in ((True, SERVING), (False, NOT_SERVING)):
                server.set_serving(serving_now)
                assert await anext(staying) == status

    run(scenario)


@pytest.mark.parametrize("port", [-1, 0])
def test_watchers_of_health_are_few(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Beyond the limit a watch is refused, on both ports; checks go on, and one that ends makes room."""
    monkeypatch.setattr(health_module, "MAX_WATCHES", 2)

    async def scenario() -> None:
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

    run(scenario)


def test_health_of_a_name_that_is_none() -> None:
    """A watch would hold it for as long as it lasts."""

    async def scenario() -> None:
        async with serving() as (_, channel):
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="x" * 257))
            assert (await failure(call.read())).field == "service"

    run(scenario)


@pytest.mark.parametrize("name", ["grpc.health.v1.Health", "grpc.health.v1.Health/Check"])
def test_a_response_larger_than_its_kind_may_be_is_a_flood(name: str) -> None:
    """The limit is the method's own; what is within it comes."""

    async def scenario() -> None:
        async with serving() as (server, _):
            async with open_channel(server.endpoint, response_bytes={name: 2}) as channel:
                assert await health(channel) == NOT_SERVING
            async with open_channel(server.endpoint, response_bytes={name: 1}) as channel:
                assert type(await failure(health(channel))) is Flood

    run(scenario)


def test_health_of_an_unknown_service() -> None:
    """A check of a name that no service has is NOT_FOUND; a watch says so and goes on."""

    async def scenario() -> None:
        async with serving() as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(channel, "nobody")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert await anext(watch(channel, "nobody")) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

    run(scenario)


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


def test_probes_need_no_certificate(tmp_path: Path) -> None:
    """The health port answers in plaintext what the TLS port would, before, while and after serving, and
    nothing else."""
    pair = self_signed(tmp_path)

    async def scenario() -> None:
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

    run(scenario)


def _probe(server: GrpcServer) -> grpc.aio.Channel:
    """A plaintext channel to the health port."""
    return open_channel(f"127.0.0.1:{server.health_port}")


def test_calls_are_refused_until_loaded() -> None:
    """Before a model is there, calls of every kind end with Unavailable and a time to come back."""

    async def scenario() -> None:
        async with serving() as (_, channel):
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            for call in (stub.GetModelInfo(INFO()), stub.Verify().read()):
                error = await failure(call)
                assert type(error) is Unavailable
                assert error.retry_after == 1.0

    run(scenario)


def test_drain_finishes_running_sessions_and_refuses_new_ones() -> None:
    """An open stream goes on and its watcher sees NOT_SERVING, while a new call is told to go elsewhere."""

    async def scenario() -> None:
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

    run(scenario)


def test_drain_gives_up_after_the_grace_period() -> None:
    """A session that never ends is cancelled, and what it held is released."""

    async def scenario() -> None:
        servicer = Servicer()
        async with serving(servicer, grace_seconds=0.05) as (server, channel):
            server.set_serving(True)
            stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
            await stream.write(verify_pb2.VerifyRequest())
            await servicer.entered.wait()
            await server.drain(lambda: 1)
            await servicer.ended.wait()
            assert isinstance(await failure(read_to_end(stream)), Unavailable)

    run(scenario)


def test_cancelled_calls_release_what_they_hold() -> None:
    """A client that goes away ends the handler, which is no error to report."""

    async def scenario() -> None:
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

    run(scenario)


def test_handlers_that_read_and_write_get_statuses_too() -> None:
    """The coroutine style of a stream works behind the interceptor and ends with its own error."""

    async def scenario() -> None:
        async with serving(WritingServicer()) as (server, channel):
            server.set_serving(True)
            stream = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
            await stream.write(verify_pb2.VerifyRequest())
            assert await stream.read() == verify_pb2.VerifyResponse()
            await stream.done_writing()
            error = await failure(stream.read())
            assert isinstance(error, InvalidRequest)
            assert error.field == "propose.tokens"

    run(scenario)


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


def test_a_refused_call_keeps_nothing() -> None:
    """What the handler had is free with the answer, not with the next garbage collection."""

    async def scenario() -> None:
        servicer = HoldingServicer()
        async with serving(servicer) as (server, channel):
            server.set_serving(True)
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            gc.disable()
            try:
                assert isinstance(await failure(stub.GetModelInfo(INFO())), InvalidRequest)
                async with asyncio.timeout(5):
                    while servicer.held is None or servicer.held() is not None:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            finally:
                gc.enable()

    run(scenario)


def test_bytes_that_are_no_message_are_the_callers_mistake() -> None:
    """Garbage ends its own call with INVALID_ARGUMENT; the service goes on."""

    async def scenario() -> None:
        async with serving() as (server, channel):
            server.set_serving(True)
            unary = channel.unary_unary(f"/{NAME}/GetModelInfo")
            stream = channel.stream_stream(f"/{NAME}/Verify")()
            await stream.write(b"\xff\xff")
            for error in (await failure(unary(b"\xff\xff")), await failure(stream.read())):
                assert isinstance(error, InvalidRequest)
            await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(INFO())

    run(scenario)


def test_reflection_has_to_be_asked_for() -> None:
    """Without the setting, nobody is told what there is."""

    async def scenario() -> None:
        async with serving() as (_, channel):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario)


def test_callers_send_no_more_than_they_may() -> None:
    """A message above max_request_mb ends its own call, and so do headers above the limit."""

    async def scenario() -> None:
        async with serving(max_request_mb=1) as (server, channel):
            server.set_serving(True)
            call = channel.unary_unary(f"/{NAME}/GetModelInfo")
            for request, metadata in ((b"x" * (1 << 20 | 1), ()), (b"", (("long", "x" * 20_000),))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(INFO())

    run(scenario)


def test_reflection_lists_the_service() -> None:
    """Generic clients can find out what is served."""

    async def scenario() -> None:
        async with serving(reflection=True) as (_, channel):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = (await call.read()).list_services_response.service
            call.cancel()
            assert {service.name for service in listed} >= {NAME, "grpc.health.v1.Health"}

    run(scenario)


@pytest.mark.parametrize("setting", ["port", "health_port"])
def test_a_taken_port_is_a_setting_to_change(setting: str) -> None:
    """Two servers never share a port by accident."""

    async def scenario() -> None:
        async with serving() as (server, _):
            second = GrpcServer(VerifyConfig(**{setting: server.port}), [NAME])
            with pytest.raises(ConfigError, match=f"^{setting}: cannot listen on 127.0.0.1:{server.port}"):
                await second.start()
            await second.stop()

    run(scenario)


def test_mutual_tls_lets_in_only_who_has_a_certificate(tmp_path: Path) -> None:
    """With an authority set, a client with its certificate is served; one without is not, nor plaintext, and
    the client turns away from a server whose certificate is for another name."""
    pair = self_signed(tmp_path)

    async def scenario() -> None:
        files = {"tls_cert": pair["cert"], "tls_key": pair["key"], "tls_ca": pair["cert"]}
        async with serving(**files) as (server, plaintext):
            async with open_channel(
                server.endpoint, tls_ca=pair["cert"], tls_cert=pair["cert"], tls_key=pair["key"]
            ) as known:
                assert await health(known, "liveness") == SERVING
            async with open_channel(
                server.endpoint,
                tls_ca=pair["cert"],
                tls_cert=pair["cert"],
                tls_key=pair["key"],
                tls_name="another",
            ) as elsewhere:
                assert type(await failure(health(elsewhere, "liveness"))) is Unavailable
            async with open_channel(server.endpoint, tls_ca=pair["cert"]) as unknown:
                assert type(await failure(health(unknown))) is Unavailable
            assert type(await failure(health(plaintext))) is Unavailable

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tls_cert": "cert.pem"}, "tls_key: must be set"),
        ({"tls_key": "key.pem"}, "tls_cert: must be set"),
        ({"tls_ca": "ca.pem"}, "tls_ca: needs"),
        ({"tls_cert": "no.pem", "tls_key": "no.pem"}, "tls_cert: cannot read 'no.pem'"),
    ],
)
def test_wrong_tls_settings_stop_the_process_at_start(settings: dict[str, str], named: str) -> None:
    """A half-configured server never falls back to plaintext."""

    async def scenario() -> None:
        with pytest.raises(ConfigError, match=named):
            GrpcServer(VerifyConfig(**settings), [NAME])

    run(scenario)
