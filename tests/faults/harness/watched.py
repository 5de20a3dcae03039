"""`outrider` with a window: a test can ask what the process holds, and move its wall clock.

    FAULTS_WINDOW=some-name python -m tests.faults.harness.watched serve verify ...

Listens on an abstract Unix socket `<FAULTS_WINDOW>-<pid>`. A line `held` is answered with the unfinished
asyncio tasks by name, `clock SECONDS` moves what `time.time` and `time.time_ns` say from now on.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections import Counter
from types import ModuleType
from typing import Any

ANSWER_SECONDS = 60.0
"""A process may be stopped when it is asked."""
_offset_ns = 0
_time_ns = time.time_ns


def _moved_ns() -> int:
    return _time_ns() + _offset_ns


def _move_wall_clock() -> None:
    """Give the process a wall clock that can be moved. gRPC keeps the real one: it computes deadlines for its
    core from it, whose clock would not move along, as it does when a machine's clock is set."""
    import grpc.aio  # noqa: F401 - for its modules to be there

    real = ModuleType("time")
    vars(real).update(vars(time))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(module, "time", None) is time:
            module.time = real
    time.time_ns = _moved_ns
    time.time = lambda: _moved_ns() / 1e9


def _held() -> dict[str, Any]:
    tasks = [
        thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task) and not thing.done()
    ]
    names = Counter(str(getattr(task.get_coro(), "__qualname__", "?")) for task in tasks)
    return {"tasks": dict(sorted(names.items())), "objects": len(gc.get_objects())}


class _Window(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            match line.decode().split():
                case ["held"]:
                    answer = _held()
                case ["clock", seconds]:
                    global _offset_ns
                    _offset_ns += int(float(seconds) * 1e9)
                    answer = {"offset_seconds": _offset_ns / 1e9}
                case words:
                    answer = {"error": f"no such command: {words}"}
            self.wfile.write(json.dumps(answer).encode() + b"\n")


def ask(window: str, pid: int, line: str) -> dict[str, Any]:
    """Say something at the window of a process; its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(f"\0{window}-{pid}")
        connection.sendall(line.encode() + b"\n")
        with connection.makefile() as answers:
            return json.loads(answers.readline())


def main() -> int:
    """Open the window and be `outrider`."""
    _move_wall_clock()
    address = f"\0{os.environ['FAULTS_WINDOW']}-{os.getpid()}"
    server = socketserver.ThreadingUnixStreamServer(address, _Window)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="window", daemon=True).start()
    from outrider.cli.main import main as outrider

    return outrider()


if __name__ == "__main__":
    raise SystemExit(main())
