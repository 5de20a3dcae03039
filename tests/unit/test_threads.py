"""How many threads a service may start."""

from __future__ import annotations

import threading

import pytest

from outrider.cli.main import main


def test_a_service_that_gets_too_few_threads_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 1 before gRPC needs them, and leaves none behind; gRPC hung, deaf to signals."""
    before, start = threading.active_count(), threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if threading.active_count() >= before + 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    assert main(["serve", "orchestrator", "--verify", "127.0.0.1:1"]) == 1
    said = (
        "outrider: no more processes or threads can be started; raise the limit (ulimit -u), or end others\n"
    )
    assert capsys.readouterr().err == said
    assert threading.active_count() == before
