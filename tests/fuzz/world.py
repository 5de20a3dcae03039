"""Real servicers on real gRPC servers in this process, and what must hold whatever they are sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import structlog
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from draft_service.core import DraftCore
from draft_service.drafters.lookup import LookupDrafter
from draft_service.engine import DraftEngine
from draft_service.servicer import DraftServicer
from outrider.config import DraftConfig, VerifyConfig
from outrider.internal.v1 import draft_pb2_grpc
from outrider.protocol.messages import OpenDraft
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from outrider.telemetry import spans
from outrider.telemetry.instruments import DraftInstruments, VerifyInstruments
from tests.fakes import INFO, FakeDraft, FakeVerify, continuation
from tests.unit.draft_service.fakes import TableDrafter
from tests.unit.orchestrator.rig import PROMPT, Rig
from tests.unit.orchestrator.test_service import text_verify
from tests.unit.orchestrator.text.test_tokenizer import TEMPLATE
from tests.unit.verify_service.fakes import LIMITS, REPLICA, STEP_SECONDS, FakeRunner
from verify_service.core import CoreSettings, VerifyCore
from verify_service.engine import VerifyEngine
from verify_service.main import SERVICE as VERIFY
from verify_service.servicer import VerifyServicer
from verify_service.speculation.cost_model import CostModel

DRAFT = "outrider.internal.v1.DraftService"
CODE = grpc.StatusCode
REFUSALS = {CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION, CODE.NOT_FOUND, CODE.RESOURCE_EXHAUSTED}
"""What a hostile message may be answered with. All but the last name the field at fault."""
PATIENCE = 30.0
"""Longest that any call takes; one that hangs fails the test."""
LINGER = 0.03
"""A stream is held open for so long after its last message: some steps have to run."""
VERIFY_INFO = replace(REPLICA, max_sessions=8)
Engine = TypeVar("Engine", VerifyEngine, DraftEngine)
DRAFT_INFO = replace(VERIFY_INFO, vocabulary_size=200, context_length=1000, kind="model")


class World:
    """Services that live through many examples, on an event loop that runs while one does. An example that
    fails leaves new ones to the next."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._started: dict[Any, Any] = {}
        self._spans = InMemorySpanExporter()
        spans.use_processor("fuzz", "here", SimpleSpanProcessor(self._spans))

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        """Run a scenario, which must make nobody log an error."""
        with capture_logs([structlog.processors.format_exc_info]) as lines:
            try:
                self._runner.run(asyncio.wait_for(scenario(self), 2 * PATIENCE))
            except BaseException:
                self._runner.run(self._stop())
                _show(lines)
                raise
        self._spans.clear()
        assert _show(lines) == []

    async def service(self, start: Callable[[], Any]) -> Any:
        """What a context manager starts, once for all examples."""
        if start not in self._started:
            self._started[start] = await self._stack.enter_async_context(start())
        return self._started[start]

    def close(self) -> None:
        """Stop everything."""
        self._runner.run(self._stop())
        self._runner.close()
        spans.shutdown_tracing()

    async def _stop(self) -> None:
        self._started.clear()
        with suppress(Exception):
            await self._stack.aclose()


def _show(lines: Iterable[Any]) -> list[Any]:
    """The errors among log lines, printed."""
    errors = [line for line in lines if line["log_level"] in ("error", "critical")]
    for line in errors:
        print(line.get("exception", line))
    return errors


@asynccontextmanager
async def _serving(server: GrpcServer, engine: Engine) -> AsyncIterator[tuple[grpc.aio.Channel, Engine, str]]:
    """Starts an engine and its server; gives a channel, the engine and the endpoint; stops both."""
    await server.start()
    server.set_serving(True)
    engine.start()
    try:
        async with open_channel(server.endpoint) as channel:
            yield channel, engine, server.endpoint
    finally:
        await server.stop()
        await engine.stop()


@asynccontextmanager
async def verify_service() -> AsyncIterator[tuple[grpc.aio.Channel, VerifyEngine, str]]:
    """The verify service around a target that is a function."""
    settings = CoreSettings("here", "life", LIMITS, 64, 60.0, True)
    cost = CostModel([1, 64], [STEP_SECONDS, STEP_SECONDS], 64)
    instruments, runner = VerifyInstruments(CollectorRegistry()), FakeRunner(num_pages=256)
    engine = VerifyEngine(
        lambda deliver: VerifyCore(runner, cost, settings, instruments, deliver),
        max_sessions=VERIFY_INFO.max_sessions,
        max_unread=8,
    )
    server = GrpcServer(VerifyConfig(), [VERIFY])
    VerifyServicer(engine, VERIFY_INFO, None).register(server.server)
    async with _serving(server, engine) as found:
        yield found


def table_drafter() -> Any:
    """Proposes from a table, which every token is in."""
    return TableDrafter(lambda tokens: (((tokens[-1] + 1) % 200, 10), ((tokens[-1] + 2) % 200, 16)))


def lookup_drafter() -> Any:
    """Proposes what followed before."""
    return LookupDrafter(max_nodes=64, max_depth=8)


def lookup_service() -> Any:
    """The draft service without a model."""
    return draft_service(lookup_drafter)


@asynccontextmanager
async def draft_service(
    make: Callable[[], Any] = table_drafter,
) -> AsyncIterator[tuple[grpc.aio.Channel, DraftEngine, str]]:
    """The draft service around a drafter."""
    config = DraftConfig(max_sessions=8)
    drafter, instruments = make(), DraftInstruments(CollectorRegistry())
    engine = DraftEngine(lambda deliver: DraftCore(drafter, config, instruments, deliver), config)
    server = GrpcServer(config, [DRAFT])
    servicer = DraftServicer(engine, DRAFT_INFO)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.server)  # type: ignore[no-untyped-call]
    async with _serving(server, engine) as found:
        yield found


def public_service(draft: FakeDraft | None = None) -> Rig:
    """The orchestrator before scripted replicas, for a model with tokenizer and chat template."""
    verify = text_verify(chat_template=TEMPLATE)
    verify.info = replace(verify.info, context_length=96)
    verify.patience = 0.0
    return Rig(verify, draft or FakeDraft(replace(INFO, context_length=96)))


class HostileDraft(FakeDraft):
    """A draft replica that says what it is told before it begins to work."""

    def __init__(self) -> None:
        super().__init__(replace(INFO, context_length=96))
        self.says: list[Any] = []

    async def _converse(self, stream: AsyncIterator[Any], opening: OpenDraft, context: Any) -> None:
        for response in self.says:
            await context.write(response)
        await super()._converse(stream, opening, context)


class HostileVerify(FakeVerify):
    """A verify replica that does, after its first verdict."""

    def __init__(self) -> None:
        super().__init__(replace(INFO, context_length=96), patience=0.0)
        self.says: list[Any] = []

    async def _wait_ready(self, session: Any) -> None:
        says, self.says = self.says, []
        for response in says:
            await self.context.write(response)
        await super()._wait_ready(session)

    async def _steps(self, session: Any, context: Any) -> None:
        self.context = context
        await super()._steps(session, context)


def behind_a_hostile_draft() -> Rig:
    """The orchestrator with a draft replica that is not kept out for what it says."""
    return Rig(FakeVerify(replace(INFO, context_length=96)), HostileDraft(), breaker_failures=1_000_000)


def behind_a_hostile_verify() -> Rig:
    """The orchestrator with a verify replica that is not kept out for what it says."""
    return Rig(HostileVerify(), FakeDraft(replace(INFO, context_length=96)), breaker_failures=1_000_000)


async def bystander(rig: Rig) -> None:
    """A request beside the hostile ones gets the target's tokens."""
    answer = await rig.generate(PROMPT, PATIENCE, max_tokens=12)
    assert answer.tokens[0] == continuation(PROMPT, 12)


async def unary(channel: grpc.aio.Channel, method: str, request: bytes) -> grpc.StatusCode:
    """The status of a unary call with these bytes."""
    return await settle(channel.unary_unary(method)(request, timeout=PATIENCE))


async def server_stream(channel: grpc.aio.Channel, method: str, request: bytes) -> grpc.StatusCode:
    """The status of a call with these bytes whose responses are read to the end."""
    call = channel.unary_stream(method)(request, timeout=PATIENCE)
    return await settle(read_to_end(call))


async def stream(endpoint: str, method: str, requests: Iterable[bytes]) -> grpc.StatusCode:
    """The status of a stream that these are written to, as far as it takes them.

    By the synchronous client: the other one may lose the server's status when it ends a call that is being
    written to.
    """

    def slowly() -> Iterator[bytes]:
        yield from requests
        time.sleep(LINGER)

    def talk() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(endpoint, options) as channel:
            for _ in channel.stream_stream(method)(slowly(), timeout=PATIENCE):
                pass

    return await settle(asyncio.to_thread(talk))


async def settle(call: Any) -> grpc.StatusCode:
    """The status of a call, which is good or a refusal that says what is wrong."""
    try:
        await call
    except grpc.RpcError as error:
        _check(error)
        return error.code()
    return CODE.OK


async def until(condition: Any) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - it has no event here
            await asyncio.sleep(0.001)


async def read_to_end(call: Any) -> None:
    """Read and forget."""
    while await call.read() is not grpc.aio.EOF:
        pass


def _check(error: Any) -> None:
    assert error.code() in REFUSALS, (error.code(), error.details())
    status = rpc_status.from_call(error)
    assert status is not None, error.details()
    info, request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    packed = [detail.Unpack(kind) for detail in status.details for kind in (info, request, retry)]
    assert any(packed)
    assert info.domain == "outrider"
    if error.code() is CODE.RESOURCE_EXHAUSTED:
        assert retry.HasField("retry_delay")
        return
    (violation,) = request.field_violations
    assert violation.field
    assert violation.field.split("[")[0].split(" ")[0] in (error.details() or "")
