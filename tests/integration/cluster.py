"""Service processes for the tests: started on free ports, watched, killed, restarted."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.forks import Fork

ROOT = Path(__file__).resolve().parents[2]
DEMO_TARGET = ROOT / "models" / "demo" / "target"
DEMO_DRAFT = ROOT / "models" / "demo" / "draft"
OUTRIDER = "outrider.cli.main"
START_SECONDS = 120.0
"""Longest start of one process."""

SMALL = {"kv_tokens": 16384}
"""Memory is filled with zeros at the start, which takes long."""
SMALL_STEPS = {"max_step_tokens": 128}
"""Steps of all sizes are measured at the start, and long ones take longest."""


class Process:
    """One `outrider` command. Its standard output is read as JSON lines, the rest goes to a log file."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], module: str = OUTRIDER
    ) -> None:
        self.arguments = list(arguments)
        self.log = log
        self.environment = dict(environment)
        self.ready: dict[str, str] = {}
        self._events: queue.Queue[dict[str, str] | None] = queue.Queue()
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
        self._fork = Fork(module, arguments, environment, log)
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._fork.pid

    @property
    def endpoint(self) -> str:
        """host:port of a ready service."""
        return self.ready["endpoint"]

    @property
    def running(self) -> bool:
        """The process has not ended."""
        return self._fork.status() is None

    def wait_ready(self) -> Process:
        """Block until the ready line has come.

        Raises:
            AssertionError: the process ended or took too long; carries the end of its log.
        """
        while not self.ready:
            event = self.next_event()
            if event.get("event") == "ready":
                self.ready = event
        return self

    def next_event(self) -> dict[str, str]:
        """The next JSON line of standard output."""
        try:
            event = self._events.get(timeout=START_SECONDS)
        except queue.Empty:
            raise AssertionError(
                f"{self.arguments} said nothing for {START_SECONDS:g} s:\n{self.tail()}"
            ) from None
        if event is None:
            raise AssertionError(f"{self.arguments} ended with {self.wait()}:\n{self.tail()}")
        return event

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        if self.running:
            os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        """Exit status; fails the test when the process does not end in time."""
        return self._fork.wait(timeout)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.running:
            self.signal(signal.SIGKILL)
        self.wait(10)

    def tail(self, characters: int = 4000) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-characters:]

    def _read(self) -> None:
        for line in self._fork.output:
            if line.startswith("{"):
                self._events.put(json.loads(line))
        self._events.put(None)


class Cluster:
    """The processes of one test module or session; `stop` ends them all."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str] | None = None, module: str = OUTRIDER
    ) -> None:
        self.folder = folder
        self.module = module
        """What `python -m` runs."""
        self.environment = dict(environment or {})
        self.processes: list[Process] = []

    def launch(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        """Start `outrider <arguments>` without waiting."""
        log = self.folder / f"{len(self.processes):02d}-{'-'.join(arguments[:2])}.log"
        process = Process(arguments, log, {**self.environment, **(environment or {})}, self.module)
        self.processes.append(process)
        return process

    def serve(self, service: str, **settings: object) -> Process:
        """Start `outrider serve <service>` on a free port without waiting.

        A setting becomes a flag; a tuple repeats it, True and False become --flag and --no-flag. Models get
        less memory and shorter steps than by default, so that they start sooner.
        """
        always: dict[str, object] = {"port": 0, "metrics_port": 0, "log_format": "json"}
        if "model" in settings:
            always |= SMALL | (SMALL_STEPS if service == "verify" else {})
        settings = {**always, **settings}
        return self.launch("serve", service, *flags(settings))

    def restart(self, process: Process) -> Process:
        """Start an ended service again on the port it had, and wait until it is ready."""
        port = ["--port", process.endpoint.rpartition(":")[2]]
        given = process.arguments[:-2] if process.arguments[-2:] == port else process.arguments
        return self.launch(*given, *port).wait_ready()

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()


def flags(settings: Mapping[str, object]) -> list[str]:
    """Command-line flags for settings."""
    found: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        for one in value if isinstance(value, tuple) else (value,):
            found += [f"--{flag}", str(one)]
    return found


@contextmanager
def demo_up(folder: Path, target: Path = DEMO_TARGET, **environment: str) -> Iterator[Process]:
    """`outrider up` with the demo draft and the OpenAI API, ready; an interrupt ends it with status 0."""
    cluster = Cluster(folder, environment)
    pair = ("--target", str(target), "--draft", str(DEMO_DRAFT), "--dtype", "float32")
    process = cluster.launch("up", *pair, "--port", "0", "--http-port", "0").wait_ready()
    yield process
    process.signal(signal.SIGINT)
    assert process.wait(60) == 0
    cluster.stop()
