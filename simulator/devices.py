"""Devices on which work takes time: accelerators, which do one job after another, and shared cores."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.timeline import Timeline, current, pause

Call = Callable[[], None]


class Device(Protocol):
    """Something that works for a number of seconds."""

    def submit(self, seconds: float, done: Call) -> None:
        """Work for some seconds, then call `done`."""


class Accelerator:
    """Does one job after another, in the order of their arrival."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._free_at = 0.0

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        start = max(self._timeline.now, self._free_at)
        self._free_at = start + seconds
        self._timeline.at(self._free_at, done)


class Core:
    """A processor core that does all its jobs at once, each at its share of the speed (processor sharing).

    `_progress` is the work, in seconds, that a job present since the beginning would have got.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._jobs: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._progress = 0.0
        self._updated = 0.0
        self._version = 0

    @property
    def jobs(self) -> int:
        """Number of jobs that share the core now."""
        return len(self._jobs)

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        self._advance()
        heapq.heappush(self._jobs, (self._progress + seconds, next(self._order), done))
        self._plan()

    def _advance(self) -> None:
        now = self._timeline.now
        if self._jobs:
            self._progress += (now - self._updated) / len(self._jobs)
        self._updated = now

    def _plan(self) -> None:
        """Plan to look again when the job with the least work left should be done."""
        self._version += 1
        version = self._version
        if self._jobs:
            left = max(self._jobs[0][0] - self._progress, 0.0) * len(self._jobs)
            self._timeline.after(left, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        end, _, done = heapq.heappop(self._jobs)
        self._progress = end
        self._plan()
        done()


class Floating:
    """Cores for work that is not pinned: each job goes to the core with the fewest jobs, in turn if equal."""

    def __init__(self, cores: Sequence[Core]) -> None:
        self._cores = list(cores)

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        core = min(self._cores, key=lambda core: core.jobs)
        self._cores.remove(core)
        self._cores.append(core)
        core.submit(seconds, done)


COOLING_SECONDS = 0.01
"""Length of a pause after which none of a thread's code and data is in the caches. Round trips of gRPC's
asyncio between two processes on cores of their own took 0.14 ms without pauses, and 0.18, 0.21, 0.30, 0.49
and 0.55 ms with pauses of 1, 2, 5, 10 and 20 ms (medians of 600 on a small virtual machine)."""


class Thread:
    """A queue of small jobs on a device, such as an event loop, which are done one after another.

    The first job after a pause of COOLING_SECONDS takes `rewarm` seconds more; after a shorter pause, a part
    of that.
    """

    def __init__(self, timeline: Timeline, device: Device, rewarm: float = 0.0) -> None:
        self._timeline = timeline
        self._device = device
        self._rewarm = rewarm
        self._waiting: deque[tuple[float, Call]] = deque()
        self._working = False
        self._done_at = -COOLING_SECONDS

    def do(self, seconds: float, then: Call) -> None:
        """Work for some seconds after all waiting jobs, then call `then`."""
        if not self._working:
            seconds += self._rewarm * min((self._timeline.now - self._done_at) / COOLING_SECONDS, 1.0)
        self._waiting.append((seconds, then))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._waiting)
        if self._working:
            seconds, then = self._waiting.popleft()
            self._device.submit(seconds, lambda: self._done(then))

    def _done(self, then: Call) -> None:
        self._done_at = self._timeline.now
        then()
        self._next()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs: the device of its forwards, the core of its code, and a core that helps it."""

    device: Device
    core: Device
    helper: Device | None = None


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps of an engine."""

    steps: int = 0
    tokens: int = 0
    sessions: int = 0
    seconds: float = 0.0

    def clear(self) -> None:
        """Set all sums to zero."""
        self.steps = self.tokens = self.sessions = 0
        self.seconds = 0.0

    def add(self, tokens: int, sessions: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.sessions += sessions
        self.seconds += seconds


PARTS = 24
"""Number of parts of shared work. Each device takes the next part when it is free."""


def work_shared(devices: Sequence[Device], seconds: float) -> None:
    """Let devices take parts of some work until none is left, and wait for all. To be called in a fiber."""
    resume, left, working = current(), PARTS, 0

    def take(device: Device) -> None:
        nonlocal left, working
        if left:
            left -= 1
            working += 1
            device.submit(seconds / PARTS, lambda: done(device))
        elif not working:
            resume()

    def done(device: Device) -> None:
        nonlocal working
        working -= 1
        take(device)

    for device in devices:
        take(device)
    pause()


def work(device: Device, seconds: float) -> None:
    """Work for some seconds. To be called in a fiber."""
    if seconds > 0.0:
        device.submit(seconds, current())
        pause()
