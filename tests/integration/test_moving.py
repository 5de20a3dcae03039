"""A verify replica drains in the middle of long texts: the other goes on with its keys and values."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.certificates import authority, issue
from tests.integration.client import AUTO, OFF, SEQUENTIAL, Client, collect, eventually, request
from tests.integration.cluster import ROOT, Cluster, Process
from tests.integration.metrics import samples
from tests.models import build_model

TOKENS = 700
ATTEMPTS = 4
PROMPT_TOKENS = 600
LARGEST_STEP = 128
"""No step of a session that was moved has more tokens; a prompt has."""
SAMPLERS: dict[str, dict[str, Any]] = {"greedy": {}, "T=1": {"temperature": 1.0, "repetition_penalty": 1.1}}
_numbers = count()


@dataclass
class Pair:
    """Two verify replicas with one target, a draft, and an orchestrator."""

    cluster: Cluster
    replicas: list[Process]
    orchestrator: Process
    client: Client

    def serving(self) -> Process:
        """The replica that runs sessions now; one of both if the sessions have ended already."""
        busy = (one for one in self.replicas if samples(one)["outrider_verify_sessions"])
        return next(busy, self.replicas[0])

    def drained(self, messages: list[Any], after: int = 5) -> tuple[list[list[int]], Process]:
        """Generate all at once; when the first has given some chunks, the replica that serves is told to end.

        Returns the tokens and the other replica; the first has ended, and is started again.
        """

        def run(message: Any) -> list[Any]:
            return list(self.client.stream(message))

        with ThreadPoolExecutor(len(messages)) as threads:
            calls = [threads.submit(run, message) for message in messages[1:]]
            responses = []
            for response in self.client.stream(messages[0]):
                responses.append(response)
                if len(responses) == after:
                    leaving = self.serving()
                    leaving.signal(signal.SIGTERM)
            texts = [collect(responses)[0].tokens, *(collect(call.result())[0].tokens for call in calls)]
        leaving.wait()
        other = next(one for one in self.replicas if one is not leaving)
        self.replicas = [self.cluster.restart(leaving), other]
        eventually(lambda: self.client.info().verify_replicas == 2, "both replicas can be used")
        return texts, other


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny Llama with a context for long texts."""
    return build_model("llama", tmp_path_factory.mktemp("target"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, target) -> Iterator[Pair]:
    """Processes of this module, with mutual TLS between orchestrator and replicas."""
    folder = tmp_path_factory.mktemp("moving")
    cluster = Cluster(folder)
    by = authority(folder / "authority")
    own, ours = (issue(by, folder / name, "IP:127.0.0.1") for name in ("replica", "orchestrator"))
    tls = {"tls_cert": own / "tls.crt", "tls_key": own / "tls.key", "tls_ca": own / "ca.crt"}
    common = {"model": target, "dtype": "float32", "grace_seconds": 60, **tls}
    started = [cluster.serve("verify", name=f"verify-{name}", **common) for name in "ab"]
    draft = cluster.serve("draft", name="draft-a", **common)
    replicas = [process.wait_ready() for process in started]
    orchestrator = cluster.serve(
        "orchestrator",
        verify=tuple(one.endpoint for one in replicas),
        draft=draft.wait_ready().endpoint,
        discovery_seconds=0.2,
        tls_client_ca=ours / "ca.crt",
        tls_client_cert=ours / "tls.crt",
        tls_client_key=ours / "tls.key",
    ).wait_ready()
    client = Client(orchestrator.endpoint)
    eventually(lambda: client.info().verify_replicas == 2, "both replicas can be used")
    yield Pair(cluster, replicas, orchestrator, client)
    cluster.stop()


def prompt() -> list[int]:
    """A prompt that shares no page with any other."""
    number = next(_numbers)
    return [2 + (number * 131 + place * place) % 290 for place in range(PROMPT_TOKENS)]


def large_steps(process: Process) -> float:
    """Steps of a replica so far that had more tokens than a session without a prompt needs."""
    with urlopen(process.ready["metrics"], timeout=5) as response:
        families = text_string_to_metric_families(response.read().decode())
    found = [sample for family in families for sample in family.samples]
    steps = sum(sample.value for sample in found if sample.name == "outrider_verify_step_tokens_count")
    small = sum(
        sample.value
        for sample in found
        if sample.name == "outrider_verify_step_tokens_bucket" and float(sample.labels["le"]) == LARGEST_STEP
    )
    return steps - small


def moves(pair: Pair) -> float:
    """Sessions whose keys and values were moved so far."""
    with urlopen(pair.orchestrator.ready["metrics"], timeout=5) as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "outrider_orchestrator_kv_moves_total" and sample.labels["outcome"] == "moved"
    )


def moved_without_prefill(pair: Pair, sampling: dict[str, Any]) -> bool:
    """Whether texts moved, and the other replica computed no prompt. Their tokens are right in any case."""
    options = {"max_tokens": TOKENS, **sampling}
    prompts = [prompt(), prompt()]
    expected = [pair.client.generate(each, **options).tokens for each in prompts]
    before, steps = moves(pair), {one.pid: large_steps(one) for one in pair.replicas}
    texts, other = pair.drained([request(each, **options) for each in prompts])
    assert texts == expected
    return moves(pair) > before and large_steps(other) == steps[other.pid]


@pytest.mark.parametrize(
    ("mode", "sampler"),
    [
        (AUTO, "T=1"),
        (SEQUENTIAL, "greedy"),
        (OFF, "T=1"),
        pytest.param(AUTO, "greedy", marks=pytest.mark.slow),
        pytest.param(SEQUENTIAL, "T=1", marks=pytest.mark.slow),
        pytest.param(OFF, "greedy", marks=pytest.mark.slow),
    ],
)
def test_sessions_move_without_prefill(pair: Pair, mode: Any, sampler: str) -> None:
    """Two long texts go on at the other replica, which computes no prompt; the tokens are always the same.

    On a busy machine a transfer may take longer than so small a prompt, which is then computed again, and a
    text may end before the replica hears of its end: one attempt of several has to show the move.
    """
    assert any(moved_without_prefill(pair, {"mode": mode, **SAMPLERS[sampler]}) for _ in range(ATTEMPTS))


def test_a_replica_that_is_killed_while_it_drains_costs_no_token(pair: Pair) -> None:
    """Whatever of the keys and values was on its way."""
    message = request(prompt(), mode=AUTO, max_tokens=TOKENS)
    expected = collect(pair.client.stream(message))[0].tokens
    responses = []
    for response in pair.client.stream(message):
        responses.append(response)
        if len(responses) == 5:
            leaving = pair.serving()
            leaving.signal(signal.SIGTERM)
            leaving.signal(signal.SIGKILL)
    assert collect(responses)[0].tokens == expected
    leaving.wait()
    pair.replicas = [pair.cluster.restart(leaving), next(one for one in pair.replicas if one is not leaving)]


@pytest.mark.slow
def test_the_benchmark_runs(target, tmp_path) -> None:
    """At a tiny size: what moved is not computed, and the table has a line per length."""
    out = tmp_path / "move.json"
    flags = ["--target", str(target), "--dtype", "float32", "--lengths", "40", "600", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.move", *flags, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert [(row["length"], row["cached"]) for row in rows] == [(40, 40), (600, 600)]
    assert "recomputed, ms" in done.stdout
