"""What the processes hold: sessions, pages, queues, tasks, file descriptors, memory."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

from tests.faults.harness.plan import ORCHESTRATORS
from tests.faults.harness.system import System
from tests.integration.cluster import Process
from tests.integration.metrics import OCCUPANCY, samples

PERIOD_SECONDS = 1.0
IDLE_SECONDS = 90.0
"""Longest time until nothing is held any more: above keepalive's 40 s for clients that disappeared."""
TASK_SLACK, FILE_SLACK = 2, 6
"""gRPC opens a few descriptors when it needs them first; a leak grows with every request."""
OCCUPIED = (*OCCUPANCY, "_draft_sessions_wanted", "_draft_sessions_waiting")
"""Gauges that are zero when nothing runs."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """What an idle process holds."""

    tasks: dict[str, int]
    files: int

    @property
    def task_count(self) -> int:
        """All tasks."""
        return sum(self.tasks.values())


@dataclass(slots=True)
class Life:
    """Memory of one process over its life: (seconds, MiB)."""

    name: str
    pid: int
    memory: list[tuple[float, float]] = field(default_factory=list)


class Watch:
    """Samples bounds and memory while a run goes on; compares what is held before and after."""

    def __init__(self, system: System) -> None:
        self.lives: dict[int, Life] = {}
        self.violations: list[str] = []
        self.highest: dict[str, float] = {}
        """Highest value of each bounded gauge."""
        self._system = system
        self._before: dict[str, Held] = {}
        self._began = time.monotonic()

    async def remember(self) -> None:
        """Note what each kind of process holds when idle and warm."""
        await self.idle()
        for name in self._system.processes:
            self._before[name] = await self.held(name)

    async def run(self) -> None:
        """Sample until cancelled."""
        self._began = time.monotonic()
        while True:
            for name, process in list(self._system.processes.items()):
                self._sample_memory(name, process)
                if name not in self._system.paused:
                    await self._sample_bounds(name, process)
            await asyncio.sleep(PERIOD_SECONDS)

    async def idle(self) -> None:
        """Wait until no session, queue entry or page is held.

        Raises:
            AssertionError: something is held for good.
        """
        end = time.monotonic() + IDLE_SECONDS
        for name, process in self._system.processes.items():
            while rest := await self._rest(process):
                assert time.monotonic() < end, f"{name} still holds {rest}"
                await asyncio.sleep(0.1)

    async def leaks(self) -> list[str]:
        """What is held now and was not before."""
        await self.idle()
        found = []
        for name, before in self._before.items():
            now = await self._settled(name, before)
            if now.task_count > before.task_count + TASK_SLACK:
                new = {task: n for task, n in now.tasks.items() if n > before.tasks.get(task, 0)}
                found.append(f"{name}: {now.task_count} tasks instead of {before.task_count}; more: {new}")
            if now.files > before.files + FILE_SLACK:
                found.append(f"{name}: {now.files} file descriptors instead of {before.files}")
        return found

    async def held(self, name: str) -> Held:
        """Tasks and file descriptors of a process now."""
        answer = await self._system.ask(name, "held")
        return Held(answer["tasks"], _files(self._system.processes[name]))

    async def _settled(self, name: str, before: Held) -> Held:
        """What it holds once connections are closed: those of clients that disappeared go by keepalive."""
        end = time.monotonic() + IDLE_SECONDS
        while True:
            now = await self.held(name)
            calm = now.task_count <= before.task_count + TASK_SLACK and now.files <= before.files + FILE_SLACK
            if calm or time.monotonic() > end:
                return now
            await asyncio.sleep(0.2)

    async def _rest(self, process: Process) -> dict[str, float]:
        """Sessions, queues and pages above zero."""
        try:
            page = await asyncio.to_thread(samples, process)
        except (OSError, URLError) as error:
            return {f"no metrics: {error}": 1.0}
        return {name: value for name, value in page.items() if value and name.endswith(OCCUPIED)}

    def _sample_memory(self, name: str, process: Process) -> None:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except OSError:
            return  # it has just been killed
        life = self.lives.setdefault(process.pid, Life(name, process.pid))
        life.memory.append((time.monotonic() - self._began, pages * PAGE_BYTES / 2**20))

    async def _sample_bounds(self, name: str, process: Process) -> None:
        try:
            page = await asyncio.to_thread(samples, process)
        except (OSError, URLError, ValueError):
            return  # it is being killed, or was stopped in the meantime
        for gauge, bound in self._bounds(name, page).items():
            value = page.get(gauge, 0.0)
            self.highest[f"{name} {gauge}"] = max(self.highest.get(f"{name} {gauge}", 0.0), value)
            if value > bound:
                self.violations.append(f"{name}: {gauge} is {value:g}, above {bound:g}")

    def _bounds(self, name: str, page: dict[str, float]) -> dict[str, float]:
        sizes = self._system.sizes
        if name in ORCHESTRATORS:
            return {
                "outrider_orchestrator_requests_running": sizes.max_running,
                "outrider_orchestrator_requests_queued": sizes.max_queued + 1,  # one is looked at
            }
        kind = name.partition("-")[0]
        return {
            f"outrider_{kind}_sessions": page.get(f"outrider_{kind}_session_limit", 0.0),
            f"outrider_{kind}_pages_used": page.get(f"outrider_{kind}_pages", 0.0),
        }


def _files(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def growth(life: Life) -> dict[str, Any]:
    """Memory in the second and the last quarter of a life: medians in MiB, and their ratio."""
    values = [value for _, value in life.memory]
    quarter = max(1, len(values) // 4)
    second, last = _median(values[quarter : 2 * quarter] or values), _median(values[-quarter:])
    return {
        "name": life.name,
        "seconds": round(life.memory[-1][0] - life.memory[0][0], 1),
        "second_quarter_mib": round(second, 1),
        "last_quarter_mib": round(last, 1),
        "growth": round(last / second - 1.0, 4),
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
