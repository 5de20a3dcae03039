"""`outrider bench` against `outrider up` on the demo pair: over gRPC, and through the OpenAI API."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import ROOT, Process
from tests.integration.command import COMMAND, ENVIRONMENT, outrider

LOAD = ("--requests", "6", "--concurrency", "2", "--max-tokens", "16", "--ignore-eos")
TEXTS = ["def main():\n", "import os\n", "class Queue:\n"]


def bench(folder: Path, *flags: str) -> dict[str, Any]:
    """The record of a load that went well."""
    prompts, out = folder / "prompts.json", folder / "out.json"
    prompts.write_text(json.dumps(TEXTS))
    done = outrider("bench", *LOAD, "--prompts", str(prompts), "--json", str(out), *flags)
    assert done.returncode == 0, done.stderr
    assert "time to first token" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def check(found: dict[str, Any]) -> None:
    """Every request has all of its tokens and its figures."""
    summary, requests = found["summary"], found["requests"]
    assert (summary["completed"], summary["failed"], summary["output_tokens"]) == (6, 0, 96)
    assert summary["goodput"]["share"] == 1.0
    for request in requests:
        assert request["output_tokens"] == 16
        assert request["input_tokens"] > 0
        assert 0 < request["ttft_s"] < request["e2e_s"]
        assert sum(request["gaps_s"]) <= request["e2e_s"] - request["ttft_s"] + 1e-6


def test_grpc(up: Process, tmp_path: Path) -> None:
    """All tokens come, and the service tells of its drafts."""
    found = bench(tmp_path, "--endpoint", up.endpoint, "--slo", "e2e=100s", "--mode", "sequential")
    check(found)
    speculation = found["summary"]["speculation"]
    assert speculation["acceptance_length"] >= 1.0
    assert 0 < speculation["accepted"] <= speculation["verified"]
    assert found["target"]["model"] == "target"


def test_random_prompts_without_drafts(up: Process, tmp_path: Path) -> None:
    """Prompts have the length asked for; the target alone commits a token per step."""
    out = tmp_path / "out.json"
    flags = ("--random-prompt-tokens", "20", "--request-rate", "inf", "--mode", "off", "--seed", "3")
    load = ("--requests", "3", "--max-tokens", "8", "--ignore-eos", "--temperature", "1")
    done = outrider("bench", "--endpoint", up.endpoint, *load, *flags, "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [request["input_tokens"] for request in found["requests"]] == [20, 20, 20]
    assert found["summary"]["speculation"]["accepted"] == 0
    assert found["summary"]["late_s"]["p99"] >= 0


@pytest.mark.parametrize("chat", [(), ("--chat",)], ids=["completions", "chat"])
def test_the_gateway(up: Process, tmp_path: Path, chat: tuple[str, ...]) -> None:
    """The same load and report through either endpoint of the OpenAI API."""
    found = bench(tmp_path, "--openai", up.ready["http"] + "/v1", "--slo", "e2e=100s", *chat)
    check(found)
    assert found["summary"]["speculation"] is None


def test_refused_requests_are_counted(up: Process) -> None:
    """By either door: what the service says of the first one, and status 1."""
    for door in (("--endpoint", up.endpoint), ("--openai", up.ready["http"] + "/v1")):
        load = ("--requests", "2", "--warm-up", "0", "--random-prompt-tokens", "9", "--temperature", "-1")
        done = outrider("bench", *door, *load)
        assert done.returncode == 1, done.stderr
        assert "failed: 2 INVALID_REQUEST\nthe first, request 0: " in done.stdout
        assert "temperature" in done.stdout


def test_an_interrupt_prints_the_figures_so_far(up: Process) -> None:
    """Status 130, a report, and no traceback."""
    load = ("--requests", "100000", "--max-tokens", "4", "--random-prompt-tokens", "4")
    command = [*COMMAND, "bench", "--endpoint", up.endpoint, *load]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        said = running.stderr.readline()
        assert said.startswith("measuring: ")
        running.send_signal(signal.SIGINT)
        out, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted: " in out
    assert "output tokens/s" in out
    assert "Traceback" not in errors
