"""KEDA's contract against a whole orchestrator, over real gRPC: the answers follow the load up and down."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from orchestrator.main import SERVICE, Orchestrator
from orchestrator.observing.scaler import MEAN_SECONDS
from orchestrator.observing.scaler_servicer import MAX_STREAMS, PER_REPLICA, REPLICAS, SESSIONS
from orchestrator.request.auth import BearerAuth
from outrider.config import OrchestratorConfig
from outrider.internal.keda import externalscaler_pb2 as pb2
from outrider.internal.keda import externalscaler_pb2_grpc
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from outrider.rpc.tls import client_certificates
from outrider.telemetry.instruments import OrchestratorInstruments
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.certificates import self_signed
from tests.fakes import FakeDraft, FakeVerify
from tests.unit.orchestrator.rig import SEQUENTIAL, Rig

SCALED = pb2.ScaledObjectRef(name="draft", namespace="outrider", scalerMetadata={"scalerAddress": "here"})


class Keda:
    """Asks as KEDA does: the specification first, then its metric, divided by its target."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.stub = externalscaler_pb2_grpc.ExternalScalerStub(rig.channel)
        self.now = rig.orchestrator.scaler.clock()
        rig.orchestrator.scaler.clock = lambda: self.now

    async def replicas(self) -> float:
        """What is needed of the pool, not rounded."""
        (spec,) = (await self.stub.GetMetricSpec(SCALED)).metricSpecs
        return await self.value(spec.metricName) / spec.targetSizeFloat

    async def value(self, name: str) -> float:
        """The value of a metric."""
        request = pb2.GetMetricsRequest(scaledObjectRef=SCALED, metricName=name)
        (metric,) = (await self.stub.GetMetrics(request)).metricValues
        assert (metric.metricName, metric.metricValue) == (name, math.ceil(metric.metricValueFloat))
        return metric.metricValueFloat

    async def active(self) -> bool:
        """Whether there is work."""
        return bool((await self.stub.IsActive(SCALED)).result)

    async def after(self, seconds: float) -> None:
        """Let so much time pass for the scaler, and have it look."""
        self.now += seconds
        self.rig.orchestrator.scaler.observe()

    async def until_wanted(self, sessions: int) -> None:
        """Wait until so many sessions want drafts, and a good while longer."""
        load = self.rig.orchestrator.servicer.observers.load
        await self.rig.until(lambda: load.wanted == sessions)
        await self.after(20 * MEAN_SECONDS)


@asynccontextmanager
async def requests(rig: Rig, verify: FakeVerify, count: int) -> AsyncIterator[None]:
    """So many requests that run until the block ends."""
    verify.hold.clear()
    asking = [asyncio.create_task(rig.generate(mode=SEQUENTIAL)) for _ in range(count)]
    try:
        yield
    finally:
        verify.hold.set()
        await asyncio.gather(*asking)


async def refused(call: Callable[[], Any]) -> grpc.StatusCode:
    """The status of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    return caught.value.code()


async def test_the_answer_follows_the_load_up_and_down() -> None:
    """Sessions come: more replicas are needed; they end: none is. The gauge says the same."""
    verify = FakeVerify()
    async with Rig(verify, FakeDraft(), draft_sessions_per_replica=2) as rig:
        keda = Keda(rig)
        await keda.until_wanted(0)
        assert (await keda.replicas(), await keda.active()) == (0.0, False)
        async with requests(rig, verify, 2):
            await keda.until_wanted(2)
            assert await keda.replicas() == pytest.approx(1.0)
            async with requests(rig, verify, 5):
                await keda.until_wanted(7)
                assert await keda.replicas() == pytest.approx(3.5)
                assert await keda.active()
                assert await keda.value(SESSIONS) == pytest.approx(7.0)
                assert await keda.value(PER_REPLICA) == 2.0
                gauge = rig.registry.get_sample_value("outrider_draft_replicas_desired")
                assert gauge == pytest.approx(3.5)
        await keda.until_wanted(0)
        assert (await keda.replicas(), await keda.active()) == (0.0, False)
        assert rig.registry.get_sample_value("outrider_draft_replicas_desired") == 0.0


async def test_sessions_of_other_orchestrators_are_seen_at_the_drafts() -> None:
    """Whichever orchestrator is asked, the answer is for the pool; its gauge is its own share."""
    verify, draft = FakeVerify(), FakeDraft()
    async with (
        Rig(verify, draft, draft_sessions_per_replica=2) as one,
        Rig(verify=(verify.endpoint,), draft=(draft.endpoint,), draft_sessions_per_replica=2) as other,
    ):
        asked = Keda(other)
        async with requests(one, verify, 3), requests(other, verify, 1):
            await other.until(lambda: other.fleet.draft_capacity().others == 3)
            await asked.until_wanted(1)
            assert await asked.replicas() == pytest.approx(2.0)
            gauge = other.registry.get_sample_value("outrider_draft_replicas_desired")
            assert gauge == pytest.approx(0.5)


async def test_a_stream_tells_changes_alone() -> None:
    """The state at the beginning, then every change, however often the scaler looks."""
    verify = FakeVerify()
    async with Rig(verify, FakeDraft()) as rig:
        keda = Keda(rig)
        stream = keda.stub.StreamIsActive(SCALED)
        assert not (await stream.read()).result
        async with requests(rig, verify, 1):
            await keda.until_wanted(1)
            assert (await stream.read()).result
            for _ in range(10):
                await keda.after(1.0)
        await keda.until_wanted(0)
        assert not (await stream.read()).result
        stream.cancel()


async def test_streams_are_bounded() -> None:
    """One more than there may be is refused; a closed one makes room."""
    async with Rig(FakeVerify(), FakeDraft()) as rig:
        keda = Keda(rig)
        streams = [keda.stub.StreamIsActive(SCALED) for _ in range(MAX_STREAMS)]
        for stream in streams:
            await stream.read()
        late = keda.stub.StreamIsActive(SCALED)
        assert await refused(late.read) is grpc.StatusCode.RESOURCE_EXHAUSTED
        streams.pop().cancel()
        await rig.until(lambda: rig.orchestrator.scaler._streams < MAX_STREAMS)
        again = keda.stub.StreamIsActive(SCALED)
        await again.read()
        for stream in (*streams, again):
            stream.cancel()


async def test_other_metrics_are_refused() -> None:
    """With the names of those that there are."""
    async with Rig(FakeVerify()) as rig:
        keda = Keda(rig)
        assert await refused(lambda: keda.value("s0-latency")) is grpc.StatusCode.INVALID_ARGUMENT
        assert await keda.value(REPLICAS) == 0.0


async def test_an_orchestrator_that_knows_no_replica_says_nothing() -> None:
    """A zero from it would end drafts that others use; KEDA then keeps the pool as it is."""
    async with Rig(FakeVerify()) as rig:
        keda, rig.fleet._served.model = Keda(rig), None
        assert await refused(keda.active) is grpc.StatusCode.UNAVAILABLE
        assert await refused(keda.replicas) is grpc.StatusCode.UNAVAILABLE


async def test_a_draining_orchestrator_still_answers() -> None:
    """KEDA's connection stays with it until it ends, and what it sees of the pool stays true."""
    verify = FakeVerify()
    async with Rig(verify, FakeDraft(), draft_sessions_per_replica=1) as rig:
        keda = Keda(rig)
        async with requests(rig, verify, 2):
            await keda.until_wanted(2)
            draining = asyncio.create_task(rig.server.drain(rig.orchestrator.running))
            await asyncio.sleep(0)
            assert await keda.replicas() == pytest.approx(2.0)
        await draining


async def test_a_draft_that_is_going_hands_its_sessions_over() -> None:
    """Sessions move to the other draft before the one that drains ends; that is no failure of either."""
    verify, going, staying = FakeVerify(patience=0.005), FakeDraft(), FakeDraft()
    async with Rig(verify, going, staying) as rig:
        asking = [asyncio.create_task(rig.generate(max_tokens=400)) for _ in range(4)]
        await rig.until(lambda: going.sessions + staying.sessions == 4)
        leaving, other = (going, staying) if going.sessions else (staying, going)
        assert leaving.server is not None
        leaving.server.set_serving(False)
        await rig.until(lambda: leaving.sessions == 0)
        await rig.until(lambda: other.sessions == 4)
        answers = await asyncio.gather(*asking)
        assert [len(answer.tokens[0]) for answer in answers] == [400] * 4
        assert rig.metric("fallbacks_total", kind="draft") == 0
        assert all(replica.failures == 0 for replica in rig.fleet.pools["draft"])


async def test_keda_needs_the_authority_and_no_token(tmp_path: Path) -> None:
    """As keda-tls with edge: the connection is encrypted, callers show a token, KEDA has none to show; who
    does not trust the authority, or speaks plaintext, gets no answer at all."""
    files = self_signed(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")
    verify = FakeVerify()
    config = OrchestratorConfig(
        port=0,
        verify=(await verify.start(),),
        tls_cert=files["cert"],
        tls_key=files["key"],
        auth_tokens_file=str(tokens),
    )
    orchestrator = Orchestrator(config, OrchestratorInstruments(CollectorRegistry()))
    assert orchestrator.tokens is not None
    server = GrpcServer(config, [SERVICE], [BearerAuth(SERVICE, orchestrator.tokens)])
    await server.start()
    await orchestrator.start(server)
    server.set_serving(True)
    certificates = client_certificates(files["cert"])
    async with open_channel(server.endpoint, certificates=certificates) as channel:
        scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        assert not (await scaler.IsActive(SCALED)).result
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        info = generation_pb2.GetModelInfoRequest()
        assert await refused(lambda: generation.GetModelInfo(info)) is grpc.StatusCode.UNAUTHENTICATED
    async with open_channel(server.endpoint) as plaintext:
        scaler = externalscaler_pb2_grpc.ExternalScalerStub(plaintext)
        assert await refused(lambda: scaler.IsActive(SCALED)) is grpc.StatusCode.UNAVAILABLE
    await orchestrator.close()
    await server.stop()
    await verify.kill()
