"""How many threads a service may start."""

from __future__ import annotations

import threading

import pytest

from outrider.cli.main import main

SAID = "outrider: no more processes or threads can be started; raise the limit (ulimit -u), or end others\n"
START = threading.Thread.start


def test_a_service_that_gets_too_few_threads_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 1 before gRPC needs them, and leaves none behind; gRPC hung, deaf to signals."""
    before = threading.active_count()
    allow(3, monkeypatch)
    assert main(["serve", "orchestrator", "--verify", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == SAID
    assert threading.active_count() == before


def test_up_wants_threads_for_all_services(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They start at the same time: each found room for itself, and the one that then got too little hung."""

    async def run(_: object) -> int:
        return 0

    monkeypatch.setattr("outrider.cli.up.command.ServiceProcesses.run", run)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    command = ["up", "--target", "models/demo/target", "--draft", "none", "--http-port", "-1"]
    allow(19, monkeypatch)
    assert main(command) == 1
    assert capsys.readouterr().err == SAID
    allow(20, monkeypatch)
    assert main(command) == 0


def allow(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process start only so many more threads."""
    before, start = threading.active_count(), START

    def start_few(thread: threading.Thread) -> None:
        if threading.active_count() >= before + threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
