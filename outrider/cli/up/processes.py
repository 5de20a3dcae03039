"""The processes of `outrider up`: carries out what the supervisor decides.

All start at once, so that a taken port is found before a model is loaded. A child's ready line means that its
health is SERVING. The orchestrator's also means that it has found all replicas and that they fit together.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider.cli.up.child import ERROR, SupervisedChild
from outrider.cli.up.plan import ChildSpec
from outrider.cli.up.supervisor import GiveUp, Restart, Supervisor
from outrider.output import announce
from outrider.process import stop_signals
from outrider.telemetry.lossy import Lossy

WRONG = 2
"""Exit status of a child whose arguments or settings are wrong."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
WRITE_AGAIN_SECONDS = 5.0
"""Seconds between attempts to write the file of replicas."""
KILL_SECONDS = 5.0
"""Seconds after the grace period until a child is killed."""


class ServiceProcesses:
    """The replicas and the orchestrator, which reads their endpoints from `replicas_file`. The file names
    none until all first replicas are ready, so that the orchestrator is ready when everything is."""

    def __init__(
        self,
        replicas: Sequence[ChildSpec],
        orchestrator: ChildSpec,
        replicas_file: Path,
        config_file: str | None,
        grace_seconds: float,
        start_child: Callable[
            [ChildSpec, str | None, Callable[[str], None]], Awaitable[SupervisedChild]
        ] = SupervisedChild.start,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        gateway: ChildSpec | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        last = [] if gateway is None else [gateway]
        self.specs = {spec.name: spec for spec in (*replicas, orchestrator, *last)}
        self.replicas = [spec.name for spec in replicas]
        self.orchestrator = orchestrator.name
        self.gateway = None if gateway is None else gateway.name
        """Started once the orchestrator's address is known."""
        self.listener = listener
        """The gateway's socket; a gateway that is started again needs it."""
        self.replicas_file = replicas_file
        self.config_file = config_file
        self.grace_seconds = grace_seconds
        self.start_child = start_child
        self.pause = pause
        """Waits the given number of seconds before a crashed child is started again."""
        self.supervisor = Supervisor(tuple(self.specs))
        self.children: dict[str, SupervisedChild] = {}
        self.endpoints: dict[str, str] = {}
        self.pages: dict[str, str] = {}
        """The services' Prometheus pages."""
        self._stderr = Lossy(sys.stderr)
        self._kept: set[str] = set()
        """Children that keep their ports."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: dict[str, Any] = {}
        """The orchestrator's ready line."""
        self._problem = ""
        """Why it ended by itself; empty if it did not."""
        self._status: asyncio.Future[int] | None = None
        """The exit status, once it is known; None before `run`."""

    async def run(self) -> int:
        """Start, watch, and stop everything; returns 0 when asked to stop, 1 when a child did not start, 2
        when its arguments or settings are wrong."""
        self._status = asyncio.get_running_loop().create_future()
        self._stop_on_signals()
        self._write_replicas()
        try:
            for name in (*self.replicas, self.orchestrator):
                await self._launch(name)
            return await self._status
        finally:
            await self._stop_all()
            if self._problem:  # the last line, below those of the services that were stopped
                self._show(self._problem)

    def _end(self, status: int) -> None:
        """Make `run` stop everything and return this status."""
        self.supervisor.stop()
        if self._status is not None and not self._status.done():
            self._status.set_result(status)

    def _on_ready(self, child: SupervisedChild) -> None:
        name, first = child.spec.name, not self.supervisor.up
        if self.supervisor.stopping or self.children.get(name) is not child:  # this child was replaced
            return
        ready = child.ready.result()
        self.supervisor.ready(name, time.monotonic())
        self.endpoints[name] = ready["endpoint"]
        self.pages |= {name: ready["metrics"]} if ready["metrics"] else {}
        self._say(name, "ready at " + " ".join(filter(None, (ready["endpoint"], ready["metrics"]))))
        if self.supervisor.up or all(replica in self.endpoints for replica in self.replicas):
            self._spawn(self._publish_replicas())
        self._keep_ports(name, ready)
        if name == self.orchestrator:
            self._ready = ready
            if first and self.gateway is not None:
                self._lead_to(ready["endpoint"])
                self._spawn(self._launch(self.gateway))
        if first and self.supervisor.up:
            pages = [page for name, page in self.pages.items() if name != self.gateway]
            _announce(self._ready, self.endpoints.get(self.gateway or ""), pages)

    def _on_exit(self, child: SupervisedChild, status: int) -> None:
        name = child.spec.name
        decision = self.supervisor.exited(name, time.monotonic())
        if isinstance(decision, GiveUp):
            self._problem = f"outrider: {name} did not start: {_sentence(child.problem, status)}"
            self._end(WRONG if status == WRONG else 1)
        elif isinstance(decision, Restart):
            self.endpoints.pop(name, None)
            self._spawn(self._publish_replicas())
            self._restart(name, f"exited with status {status}", decision)

    async def _launch(self, name: str) -> None:
        spec = self.specs[name]
        child = await self.start_child(spec, self.config_file, lambda line: self._say(name, line))
        self.children[name] = child
        self._spawn(self._await_ready(child))
        self._spawn(self._await_exit(child))

    def _restart(self, name: str, problem: str, decision: Restart) -> None:
        self._say(name, f"{problem}; restarting in {decision.pause_seconds:g} s")
        self._spawn(self._relaunch(name, decision.pause_seconds))

    async def _relaunch(self, name: str, pause_seconds: float) -> None:
        await self.pause(pause_seconds)
        if self.supervisor.stopping:
            return
        try:
            await self._launch(name)
        except OSError as error:  # this machine has no room for a process now; perhaps that is why it crashed
            decision = self.supervisor.exited(name, time.monotonic())
            if isinstance(decision, Restart):
                self._restart(name, f"cannot be started ({error.strerror})", decision)

    async def _await_ready(self, child: SupervisedChild) -> None:
        await child.ready
        self._on_ready(child)

    async def _await_exit(self, child: SupervisedChild) -> None:
        self._on_exit(child, await child.wait())

    async def _stop_all(self) -> None:
        """Stop gateway and orchestrator first, so that their requests end on replicas that still run."""
        self.supervisor.stop()
        for task in self._tasks:  # also starts that have begun, whose processes nobody would stop
            task.cancel()
        if self.listener is not None:  # else callers that still come would wait for nobody
            self.listener.close()
        running = dict(self.children)
        for name in (self.gateway, self.orchestrator):
            if name in running:
                await self._stop([running.pop(name)])
        await self._stop(list(running.values()))

    async def _stop(self, children: Sequence[SupervisedChild]) -> None:
        for child in children:
            child.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.grace_seconds + KILL_SECONDS):
                await asyncio.gather(*(child.wait() for child in children))
        except TimeoutError:
            for child in children:
                child.send(signal.SIGKILL)
            await asyncio.gather(*(child.wait() for child in children))

    def _stop_on_signals(self) -> None:
        """The first signal stops all in order, the second one kills."""

        def receive() -> None:
            if self.supervisor.stopping:
                for child in self.children.values():
                    child.send(signal.SIGKILL)
            self._end(0)

        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, receive)

    def _keep_ports(self, name: str, ready: dict[str, Any]) -> None:
        """Have a child that is started again listen where its clients and its scraper know it: the
        orchestrator's address, and the metrics page of each."""
        if name in self._kept or name == self.gateway:
            return
        self._kept.add(name)
        kept = ["--port", ready["endpoint"].rpartition(":")[2]] if name == self.orchestrator else []
        kept += ["--metrics-port", str(urlsplit(ready["metrics"]).port)] if ready["metrics"] else []
        spec = self.specs[name]
        self.specs[name] = replace(spec, arguments=(*spec.arguments, *kept))

    def _lead_to(self, endpoint: str) -> None:
        """Give the gateway the address of the orchestrator."""
        assert self.gateway is not None
        spec = self.specs[self.gateway]
        host, _, port = endpoint.rpartition(":")
        arguments = (*spec.arguments, "--orchestrator", f"{LOOPBACK.get(host, host)}:{port}")
        self.specs[self.gateway] = replace(spec, arguments=arguments)

    async def _publish_replicas(self) -> None:
        """Write the file. While its disk is full, try again, unless a later call has other lines to write."""
        lines = self._lines()
        while lines == self._lines():
            try:
                self._write_replicas()
            except OSError as error:
                self._show(f"outrider: cannot write {self.replicas_file} ({error.strerror}); make room there")
                await self.pause(WRITE_AGAIN_SECONDS)
            else:
                return

    def _write_replicas(self) -> None:
        """Replace the file as a whole, so that a reader never sees half of it. Its folder is temporary: what
        tidies up such folders may have deleted it."""
        self.replicas_file.parent.mkdir(mode=0o700, exist_ok=True)
        new = self.replicas_file.with_suffix(".new")
        new.write_text("".join(self._lines()))
        os.replace(new, self.replicas_file)

    def _lines(self) -> list[str]:
        known = [name for name in self.endpoints if name in self.replicas]
        return [f"{self.specs[name].service} {self.endpoints[name]}\n" for name in known]

    def _say(self, name: str, line: str) -> None:
        width = max(map(len, self.specs))
        self._show(f"{name:<{width}} | {line}")

    def _show(self, line: str) -> None:
        self._stderr.write(f"{line}\n")
        self._stderr.flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        """A task has ended; `run` raises what it raised."""
        self._tasks.discard(task)
        if task.cancelled() or self._status is None or self._status.done():
            return
        if (error := task.exception()) is not None:
            self._status.set_exception(error)


def _announce(ready: dict[str, Any], http: str | None, pages: Sequence[str]) -> None:
    """Print that all is ready: as text on a terminal, as a line for programs elsewhere."""
    if not sys.stdout.isatty():
        more = {**({"http": http} if http else {}), **({"pages": pages} if pages else {})}
        announce({**ready, "service": "up", **more})
        return
    print(f"\nready at {ready['endpoint']}    Ctrl-C stops")
    if http:
        print(f"OpenAI API at {http}/v1, a page to look at in a browser at {http}/")
    if pages:
        print(f"watch: outrider top --metrics {' '.join(pages)}")
    print(f"try: outrider generate --endpoint {ready['endpoint']} 'def fibonacci(n):'\n", flush=True)


def _sentence(problem: str, status: int) -> str:
    """Why a child did not start. What one that a signal ended said last has nothing to do with it."""
    if status < 0 and not problem.startswith(ERROR):
        lack = "; perhaps this machine has too little memory" if status == -signal.SIGKILL else ""
        return f"it was ended by signal {-status}{lack}"
    return problem.removeprefix(ERROR) or f"it ended with status {status}"
