"""The `outrider` command as a user meets it: up, generate, timeline."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.integration.client import AUTO, SEQUENTIAL, Client, eventually
from tests.integration.cluster import ROOT, demo_up
from tests.integration.command import COMMAND, ENVIRONMENT, outrider
from tests.integration.reference import assert_same


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


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """`outrider up` of this module: it is broken, and ended at last."""
    with demo_up(tmp_path_factory.mktemp("up")) as process:
        yield process


def test_up_serves_the_pair(up, reference, prompts):
    """Once it is ready, the endpoint generates the target's tokens, soon with drafts that are accepted."""
    prompt, client = prompts(2)[1], Client(up.endpoint)
    expected = reference.greedy(prompt, 24)

    def accepted(mode: int) -> int:
        generation = client.generate(prompt, mode=mode, max_tokens=24)
        assert_same(reference, prompt, expected, generation.tokens)
        return generation.statistics.accepted

    accepted(AUTO)  # there a draft that is late rests
    eventually(lambda: accepted(SEQUENTIAL) > 0, "a drafted token is accepted")


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


def test_generate_resumes_when_the_orchestrator_is_killed(up):
    """The text is that of an unbroken stream with the seed that the service chose; stderr tells of it."""
    request = ("generate", "--endpoint", up.endpoint, "--max-tokens", "900", "--ignore-eos")
    request += ("--temperature", "1", "--stats", "def main():\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([*COMMAND, *request], cwd=ROOT, env=ENVIRONMENT, **pipes) as broken:
        begin = broken.stdout.read(1)
        os.kill(children(up.pid)["orchestrator"], signal.SIGKILL)
        rest, said = (stream.decode() for stream in broken.communicate(timeout=120))
    assert broken.returncode == 0, said
    assert "outrider: the stream broke after" in said
    assert "; resuming it" in said
    seed = re.search(r"seed (\d+)\]", said)[1]
    whole = outrider(*request, "--seed", seed)
    assert whole.returncode == 0, whole.stderr
    assert begin.decode() + rest == whole.stdout


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
        try:
            generation = client.generate(prompt, mode=SEQUENTIAL, max_tokens=24)
        except grpc.RpcError as error:  # on a busy machine it may be longer away than an orchestrator waits
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        assert_same(reference, prompt, reference.greedy(prompt, 24), generation.tokens)
        return generation.statistics.draft_micros > 0

    eventually(drafted, "drafts are used again", 120)


def test_an_interrupt_stops_everything(up):
    """Ctrl-C ends all services of `outrider up`, with exit status 0; no test behind this one has them."""
    services = children(up.pid)
    assert set(services) == {"orchestrator", "draft", "verify", "gateway"}
    up.signal(signal.SIGINT)
    assert up.wait(30) == 0
    for pid in services.values():
        assert not Path(f"/proc/{pid}").exists()


def test_an_unreachable_endpoint_is_explained():
    """`outrider generate` against nothing fails with one sentence."""
    done = outrider("generate", "--endpoint", "127.0.0.1:1", "hello")
    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
