"""The `outrider` command as a user meets it: up, generate, timeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.client import Client, eventually
from tests.integration.cluster import DEMO_DRAFT, DEMO_TARGET, ROOT, Cluster
from tests.integration.reference import assert_same


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "outrider.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """`outrider up` on the demo pair, ready."""
    cluster = Cluster(tmp_path_factory.mktemp("up"))
    pair = ("--target", str(DEMO_TARGET), "--draft", str(DEMO_DRAFT), "--dtype", "float32")
    process = cluster.launch("up", *pair, "--port", "0").wait_ready()
    yield process
    process.signal(signal.SIGINT)
    process.wait(30)
    cluster.stop()


def children(pid: int) -> dict[str, int]:
    """Process ids of a process's service children, by service."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_text().split("\0")
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == pid and "serve" in command:
            found[command[command.index("serve") + 1]] = int(status.parent.name)
    return found


def test_up_serves_the_pair(up, reference, prompts):
    """Once it is ready, the endpoint generates the target's tokens, soon with drafts that are accepted."""
    prompt = prompts(2)[1]
    expected = reference.greedy(prompt, 24)

    def accepted() -> bool:
        generation = Client(up.endpoint).generate(prompt, max_tokens=24)
        assert_same(reference, prompt, expected, generation.tokens)
        return generation.statistics.accepted > 0

    eventually(accepted, "a drafted token is accepted")


def test_generate_streams_text(up):
    """`outrider generate` prints the text of the continuation, and with --json its statistics."""
    plain = outrider("generate", "--endpoint", up.endpoint, "--max-tokens", "16", "def main():\n")
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip()
    detailed = outrider(
        "generate", "--endpoint", up.endpoint, "--max-tokens", "16", "--json", "def main():\n"
    )
    assert detailed.returncode == 0, detailed.stderr
    record = json.loads(detailed.stdout.strip().splitlines()[-1])
    assert "speculation" in record


def test_timeline_draws_the_steps(up, tmp_path):
    """`outrider timeline` writes a picture and a Chrome trace of one request."""
    picture, trace = tmp_path / "timeline.html", tmp_path / "trace.json"
    for output in (picture, trace):
        done = outrider(
            "timeline",
            "--endpoint",
            up.endpoint,
            "--max-tokens",
            "16",
            "--output",
            str(output),
            "x = 1\n",
        )
        assert done.returncode == 0, done.stderr
    assert "<svg" in picture.read_text() or "<html" in picture.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("service", ["draft", "verify"])
def test_up_restarts_a_crashed_replica(up, reference, prompts, service):
    """A killed replica is started again, and requests get the right tokens as soon as it is back."""
    before = children(up.pid)
    os.kill(before[service], signal.SIGKILL)
    eventually(
        lambda: children(up.pid).get(service, before[service]) != before[service], "it is restarted", 30
    )
    client = Client(up.endpoint)
    prompt = prompts(3)[2]

    def drafted() -> bool:
        generation = client.generate(prompt, max_tokens=24)
        assert_same(reference, prompt, reference.greedy(prompt, 24), generation.tokens)
        return generation.statistics.draft_micros > 0

    eventually(drafted, "drafts are used again", 60)


def test_an_interrupt_stops_everything(own_cluster):
    """Ctrl-C ends all services of `outrider up`, with exit status 0."""
    pair = ("--target", str(DEMO_TARGET), "--draft", str(DEMO_DRAFT))
    process = own_cluster.launch("up", *pair, "--port", "0").wait_ready()
    services = children(process.pid)
    assert set(services) == {"orchestrator", "draft", "verify"}
    process.signal(signal.SIGINT)
    assert process.wait(30) == 0
    for pid in services.values():
        assert not Path(f"/proc/{pid}").exists()


def test_an_unreachable_endpoint_is_explained():
    """`outrider generate` against nothing fails with one sentence."""
    done = outrider("generate", "--endpoint", "127.0.0.1:1", "hello")
    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
