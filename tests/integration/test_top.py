"""`outrider top` before services at work."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import threading
import time

import pytest

from tests.integration.client import SEQUENTIAL
from tests.integration.cluster import ROOT, Process
from tests.integration.command import COMMAND, ENVIRONMENT, outrider

SECONDS = 60.0
LEAVES_THE_SCREEN = b"\x1b[?1049l"


@pytest.fixture(scope="module")
def pages(demo) -> list[str]:
    """The pages of the orchestrator and its replicas."""
    endpoints = {demo.orchestrator("real").endpoint, demo.verify.endpoint, demo.draft("real")}
    found: list[Process] = [one for one in demo.cluster.processes if one.ready and one.endpoint in endpoints]
    return [process.ready["metrics"] for process in found]


def test_a_frame_of_services_at_work(demo, pages) -> None:
    """While requests of two callers run: their task, their tokens, and both replicas with what they hold."""
    # Sequential, as a draft that does not pay rests in other modes.
    asked = {"max_tokens": 1500, "task": "watched", "ignore_eos": True, "mode": SEQUENTIAL}
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            demo.client("real").generate("def f(n):", **asked)

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    said = outrider("top", "--once", "--interval", "1.5", "--metrics", *pages).stdout
    enough.set()
    for caller in callers:
        caller.join(SECONDS)
    task = re.search(r"^watched +(\d+) +(\d+\.\d+)", said, re.M)
    assert task, said
    assert int(task[1]) > 0
    assert float(task[2]) >= 1.0
    assert re.search("[12] running, 0 waiting", said), said
    for kind in ("verify", "draft"):
        row = re.search(rf"^{kind} 127\.0\.0\.1:\d+ +[12] of \d+ +\d+ ", said, re.M)
        assert row, said


def test_ctrl_c_leaves_the_terminal_as_it_was(pages) -> None:
    """A live view on a terminal: it draws, ends with status 0 and gives the screen back."""
    controller, terminal = pty.openpty()
    command = [*COMMAND, "top", "--interval", "0.2", "--metrics", *pages]
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        _read(controller, b"draft pool")
        process.send_signal(signal.SIGINT)
        _read(controller, LEAVES_THE_SCREEN)
        assert process.wait(SECONDS) == 0
    os.close(controller)


def _read(controller: int, until: bytes) -> bytes:
    """What is written on a terminal up to a sign."""
    found, deadline = b"", time.monotonic() + SECONDS
    while until not in found:
        ready, _, _ = select.select([controller], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, found
        found += os.read(controller, 65536)
    return found
