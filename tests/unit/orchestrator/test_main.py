"""The process: what stops it at the start, how fast it starts, what it says about itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from orchestrator.main import SERVICE, Orchestrator
from orchestrator.replicas import fleet
from orchestrator.replicas.pool import LOST_PROBES, ReplicaState
from orchestrator.replicas.probe import Probe, probe
from outrider.config import OrchestratorConfig
from outrider.protocol.errors import ConfigError
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.instruments import OrchestratorInstruments
from tests.fakes import FakeDraft, FakeVerify
from tests.unit.orchestrator.rig import Rig, until


def build(**settings: object) -> Orchestrator:
    """An orchestrator that is not started."""
    return Orchestrator(OrchestratorConfig(**settings), OrchestratorInstruments(CollectorRegistry()))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, "verify"), ({"verify": ("here",)}, "verify"), ({"verify": ("a:1",), "draft": ("dns:b",)}, "draft")],
)
def test_bad_settings_stop_the_process(settings: dict[str, object], named: str) -> None:
    """A setting that cannot work is named before anything is served."""
    with pytest.raises(ConfigError, match=named):
        build(**settings)


def test_no_torch_and_a_quick_start() -> None:
    """Importing the orchestrator loads neither torch nor the tokenizer libraries."""
    code = "import orchestrator.main, sys; print([m for m in sys.modules if m in %r])"
    heavy = ("torch", "transformers", "tokenizers", "jinja2")
    result = subprocess.run(
        [sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


async def test_the_first_request_finds_its_draft() -> None:
    """Ready means that every listed replica has been looked at, drafts too; a dead one holds nothing up."""
    draft, dead = FakeDraft(), FakeDraft()
    drafts = (await draft.start(), await dead.start())
    await dead.kill()
    async with Rig(FakeVerify(), draft=drafts) as rig:
        assert [r.info is not None for r in rig.fleet.pools["draft"]] == [True, False]
    await draft.kill()


async def test_a_pair_that_does_not_fit_ends_the_start() -> None:
    """With `require_fit`, what else keeps a draft out ends the process before it says that it is ready."""
    verify, draft = FakeVerify(), FakeDraft()
    draft.info = replace(draft.info, model="other", vocabulary_hash="another")
    settings = {"verify": (await verify.start(),), "draft": (await draft.start(),)}
    server = GrpcServer(OrchestratorConfig(port=0), [SERVICE])
    with pytest.raises(ConfigError, match="draft: the vocabulary of 'other' is not that of 'fake'; use"):
        await build(**settings, require_fit=True).start(server)
    orchestrator = await build(**settings).start(server)
    await orchestrator.close()
    for replica in (verify, draft):
        await replica.kill()


async def test_a_head_for_another_target_is_told_with_its_mend() -> None:
    """What to change is that of the misfit: a draft with the target's tokenizer would not help a head."""
    verify, draft = FakeVerify(), FakeDraft()
    draft.info = replace(draft.info, model="head", feature_layers=(1,), hidden_size=7)
    settings = {"verify": (await verify.start(),), "draft": (await draft.start(),)}
    server = GrpcServer(OrchestratorConfig(port=0), [SERVICE])
    with pytest.raises(ConfigError, match=r"use a head that was trained for it, or use lookup$"):
        await build(**settings, require_fit=True).start(server)
    for replica in (verify, draft):
        await replica.kill()


async def test_not_serving_until_a_verify_replica_is_known() -> None:
    """The orchestrator starts without any replica and is ready when the first verify replica appears."""
    verify = FakeVerify()
    endpoint = await verify.start()
    await verify.kill()
    server = GrpcServer(OrchestratorConfig(port=0), [SERVICE])
    await server.start()
    orchestrator = build(verify=(endpoint,), discovery_seconds=0.1)
    starting = asyncio.create_task(orchestrator.start(server))
    await until(lambda: any(r.missed_probes for r in orchestrator.fleet.pools["verify"]))
    assert not starting.done()
    await verify.restart()
    await starting
    await orchestrator.close()
    await server.stop()
    await verify.kill()


async def test_health_follows_the_verify_replicas() -> None:
    """Health is NOT_SERVING while no verify replica answers, and SERVING again afterwards."""
    async with Rig(verify := FakeVerify()) as rig, open_channel(rig.server.endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def becomes(status: int) -> None:
            async for answer in health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
                if answer.status == status:
                    return

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        await verify.kill()
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        await verify.restart()
        await becomes(health_pb2.HealthCheckResponse.SERVING)


async def test_health_tells_of_a_verify_replica_lost_during_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes while the start waits for a draft's answer: health is NOT_SERVING until it is back."""
    verify, answer = FakeVerify(), asyncio.Event()

    async def slow_draft(kind: str, channel: grpc.aio.Channel) -> Probe:
        if kind == "draft":
            await answer.wait()
        return await probe(kind, channel)

    monkeypatch.setattr(fleet, "probe", slow_draft)
    server = GrpcServer(OrchestratorConfig(port=0), [SERVICE])
    await server.start()
    orchestrator = build(verify=(await verify.start(),), draft=("127.0.0.1:1",), discovery_seconds=0.1)
    starting = asyncio.create_task(orchestrator.start(server))
    await until(lambda: orchestrator.fleet.served is not None)
    await verify.kill()
    await until(lambda: orchestrator.fleet.pools["verify"].count(ReplicaState.DOWN, 0.0))
    answer.set()
    await starting
    server.set_serving(True)
    async with open_channel(server.endpoint) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await verify.restart()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await orchestrator.close()
    await server.stop()
    await verify.kill()


async def test_replicas_that_round_differently_are_told_of() -> None:
    """A verify replica whose arithmetic is not its pool's is named once, with what to change; it serves."""
    tiles, vectors = FakeVerify(), FakeVerify()
    tiles.info = replace(tiles.info, arithmetic="amx")
    vectors.info = replace(vectors.info, arithmetic="avx512")
    with capture_logs() as lines:
        async with Rig(tiles, vectors) as rig:
            await rig.until(lambda: rig.fleet.pools["verify"].count(ReplicaState.USABLE, 0.0) == 2)
    differing = [line for line in lines if "differ in arithmetic" in line["event"]]
    assert len(differing) == 1
    assert "cpu_backend" in differing[0]["event"]
    assert {differing[0]["arithmetic"], differing[0]["others"]} == {"amx", "avx512"}


async def test_replaced_model_is_taken_up() -> None:
    """When the last verify replica with the old model is gone, the new model is served."""
    async with Rig(verify := FakeVerify()) as rig:
        await verify.kill()
        await rig.until(lambda: rig.fleet.pools["verify"].find(verify.endpoint).missed_probes > 0)
        verify.info = replace(verify.info, model="newer")
        await verify.restart()
        await rig.until(lambda: rig.fleet.served.info.model == "newer")
        await rig.generate(model="newer")


async def test_replica_taken_from_the_file_ends_no_session(tmp_path: Path) -> None:
    """A replica that is no longer listed gets no new sessions; those it has go on."""
    verifies = FakeVerify(), FakeVerify()
    endpoints = [await verify.start() for verify in verifies]
    file = tmp_path / "replicas"
    file.write_text("".join(f"verify {endpoint}\n" for endpoint in endpoints))
    async with Rig(replicas_file=str(file)) as rig:
        await rig.until(lambda: len(rig.fleet.pools["verify"].usable(0.0)) == 2)
        for verify in verifies:
            verify.hold.clear()
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: any(verify.sessions for verify in verifies))
        busy = 0 if verifies[0].sessions else 1
        file.write_text(f"verify {endpoints[1 - busy]}\n")
        await rig.until(lambda: len(list(rig.fleet.pools["verify"])) == 1)
        for verify in verifies:
            verify.hold.set()
        assert (await asking).completes[0].speculation.verify_losses == 0
        await rig.generate()
        assert len(verifies[1 - busy].openings) == 1
    for verify in verifies:
        await verify.kill()


async def test_replica_that_drains_finishes_its_sessions() -> None:
    """It says no more what it serves, as long as its grace period lasts; its sessions notice nothing."""
    async with Rig(verify := FakeVerify()) as rig:
        verify.hold.clear()
        asking = asyncio.create_task(rig.generate())
        await rig.until(lambda: verify.sessions == 1)
        assert verify.server is not None
        draining = asyncio.create_task(verify.server.drain(lambda: verify.sessions))
        (replica,) = rig.fleet.pools["verify"]
        await rig.until(lambda: not replica.serving)
        for _ in range(LOST_PROBES + 1):
            replica.reachable = False  # what the next probe is to find otherwise
            await rig.until(lambda: replica.reachable)
        verify.hold.set()
        assert (await asking).completes[0].speculation.verify_losses == 0
        await draining
