"""How many drafts the scaler says are needed, and drafts that leave under load."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from outrider.internal.keda import externalscaler_pb2 as pb2
from outrider.internal.keda import externalscaler_pb2_grpc
from tests.integration.client import OFF, SEQUENTIAL, Client, Generation, draft_info, eventually
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, Cluster, Process
from tests.integration.reference import assert_same

TOKENS = 256
LONG = 800
"""Tokens of a request that is still running when its draft goes."""
GRACE_SECONDS = 60
"""Of drafts: longer than anything that is waited for, so that nothing ends by its running out."""
START_SECONDS = 90.0
"""Longest start of another draft, on a machine that has other things to do."""


@contextmanager
def load(endpoint: str, prompts: list[list[int]]) -> Iterator[list[Generation]]:
    """One client per prompt that asks again and again, until the block ends; gives what they got."""
    over, got = threading.Event(), []

    def ask(prompt: list[int]) -> None:
        client = Client(endpoint)
        while not over.is_set():  # sequential requests always want a draft, whether it pays or not
            got.append(client.generate(prompt, max_tokens=TOKENS, mode=SEQUENTIAL))

    clients = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for client in clients:
        client.start()
    try:
        yield got
    finally:
        over.set()
        for client in clients:
            client.join()


def test_keda_is_told_how_many_drafts_the_load_needs(own_cluster, prompts):
    """Five clients, where one replica is taken to serve two, need three drafts: who scales them hears it by
    asking as KEDA does."""
    up = own_cluster.launch(
        *("up", "--target", str(DEMO_TARGET), "--draft", "lookup", "--port", "0"),
        environment={"OUTRIDER_ORCHESTRATOR_DRAFT_SESSIONS_PER_REPLICA": "2"},
    ).wait_ready()
    client = Client(up.endpoint)
    scaler = externalscaler_pb2_grpc.ExternalScalerStub(client.channel)
    asked = pb2.GetMetricsRequest(metricName="outrider_draft_replicas_desired")

    def needed() -> float:
        (value,) = scaler.GetMetrics(asked).metricValues
        return value.metricValueFloat

    with load(up.endpoint, prompts(5)) as got:
        eventually(lambda: needed() > 2.2, "three drafts are needed", START_SECONDS)
        assert scaler.IsActive(pb2.ScaledObjectRef(name="draft")).result
        assert client.info().draft_replicas == 1
    assert {len(one.tokens) for one in got} == {TOKENS}
    up.signal(signal.SIGINT)
    assert up.wait(30) == 0


@pytest.fixture
def two_drafts(own_cluster: Cluster, demo, tmp_path: Path) -> tuple[Client, Path, list[Process]]:
    """An orchestrator that reads its two drafts from a file."""
    drafts = [
        own_cluster.serve("draft", name=name, model=DEMO_DRAFT, dtype="float32", grace_seconds=GRACE_SECONDS)
        for name in ("a", "b")
    ]
    file = tmp_path / "replicas"
    lines = [f"draft {draft.wait_ready().endpoint}\n" for draft in drafts]
    file.write_text(f"verify {demo.verify.endpoint}\n" + "".join(lines))
    orchestrator = own_cluster.serve(
        "orchestrator", replicas_file=file, verify=demo.verify.endpoint, discovery_seconds=0.2
    ).wait_ready()
    client = Client(orchestrator.endpoint)
    eventually(lambda: client.info().draft_replicas == 2, "both drafts are known")
    return client, file, drafts


@pytest.mark.parametrize("how", ["taken from the file", "told to end"])
def test_a_draft_that_goes_hands_its_session_over(two_drafts, reference, prompts, how):
    """The session moves to the other draft long before the grace period is over, and loses no token."""
    client, file, drafts = two_drafts
    prompt, got = prompts(5)[4], []
    # sequential: it wants a draft all the time, and is slow enough to be met in the middle
    running = threading.Thread(
        target=lambda: got.append(client.generate(prompt, max_tokens=LONG, mode=SEQUENTIAL, temperature=1.0))
    )
    running.start()
    eventually(lambda: any(_sessions(draft) for draft in drafts), "a draft takes part")
    going, other = drafts if _sessions(drafts[0]) else reversed(drafts)
    if how == "told to end":
        going.signal(signal.SIGTERM)
    else:
        kept = [line for line in file.read_text().splitlines(True) if going.endpoint not in line]
        file.write_text("".join(kept))
    eventually(lambda: _sessions(other) == 1, "the session has moved", 10)
    if how == "told to end":
        assert going.wait(GRACE_SECONDS - 10) == 0
    else:
        eventually(lambda: _sessions(going) == 0, "it has left the other")
    running.join()
    expected = client.generate(prompt, max_tokens=LONG, mode=OFF, temperature=1.0).tokens
    assert_same(reference, prompt, expected, got[0].tokens)


def _sessions(draft: Process) -> int:
    """Open sessions; those of a draft that drains cannot be asked for."""
    try:
        return draft_info(draft.endpoint).sessions
    except grpc.RpcError:
        return 0
