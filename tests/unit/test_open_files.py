"""How many files a service may open."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("limits", "allowed"), [((64, 100), 100), ((64, 300), 200), ((250, 300), 250)])
def test_a_service_may_open_more_files_than_usual(limits: tuple[int, int], allowed: int) -> None:
    """Where the system lets it: a port takes more connections than the usual limit of files."""
    assert _files_and_connections(200, limits)[0] == allowed


@pytest.mark.parametrize(("most", "connections"), [(100, 25), (16384, 2048)])
def test_connections_leave_files_for_other_uses(most: int, connections: int) -> None:
    """Each port takes a quarter of the files at most, and says so if these are few."""
    _, taken, said = _files_and_connections(8192, (64, most))
    assert taken == connections
    assert ("ulimit -Hn" in said) == (connections < 2048)


def test_too_few_files_for_a_service_are_one_sentence() -> None:
    """It ends with status 1; gRPC ended it with an abort."""
    command = 'ulimit -n 16; exec "$0" -m outrider serve orchestrator --port 0 --verify 127.0.0.1:1'
    ended = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60)
    said = "outrider: this process may open no more files; raise the limit (ulimit -n)\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def _files_and_connections(files: int, limits: tuple[int, int]) -> tuple[int, int, str]:
    """Of a process that may open files within `limits`: its limit, connections to each port, and its log."""
    program = "import resource; from outrider import open_files\n"
    program += f"open_files.FILES = {files}; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
    program += "open_files.allow_files()\n"
    program += "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], open_files.most_connections())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    *said, last = ended.stdout.splitlines()
    allowed, connections = map(int, last.split())
    return allowed, connections, "\n".join(said) + ended.stderr
