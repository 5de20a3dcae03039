"""What work takes time on: accelerators that do one thing after the other, and cores that are shared."""

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
        """Work for some seconds, then call."""


class Accelerator:
    """One piece of work after the other, in the order in which they came."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._free_at = 0.0

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        start = max(self._timeline.now, self._free_at)
        self._free_at = start + seconds
        self._timeline.at(self._free_at, done)


class Core:
    """A processor core whose work all goes on at once, each at its share of the speed (processor sharing).

    `_progress` is the work that a job present since the beginning would have got.
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
        """Pieces of work that share the core now."""
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
        """Look again when the shortest job should be done."""
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
    """Not pinned: each piece of work goes to the core that has least to do, in turn among equals."""

    def __init__(self, cores: Sequence[Core]) -> None:
        self._cores = list(cores)

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        core = min(self._cores, key=lambda core: core.jobs)
        self._cores.remove(core)
        self._cores.append(core)
        core.submit(seconds, done)


COOLING_SECONDS = 0.01
"""Of a pause after which nothing of a thread's code and data is in the caches: round trips of gRPC's asyncio
between two processes on cores of their own took 0.14 ms without pauses, 0.18, 0.21, 0.30, 0.49 and 0.55 with
pauses of 1, 2, 5, 10 and 20 ms (medians of 600 on a small virtual machine)."""


class Thread:
    """A queue of small jobs on a device, such as an event loop: one after the other.

    The first job after a pause of COOLING_SECONDS takes `rewarm` seconds more, after a shorter one less.
    """

    def __init__(self, timeline: Timeline, device: Device, rewarm: float = 0.0) -> None:
        self._timeline = timeline
        self._device = device
        self._rewarm = rewarm
        self._waiting: deque[tuple[float, Call]] = deque()
        self._working = False
        self._done_at = -COOLING_SECONDS

    def do(self, seconds: float, then: Call) -> None:
        """Work for some seconds after all that waits, then call."""
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
    """Where an engine runs: its forwards, its own code, and the core of others that helps with long steps."""

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
        """Begin anew."""
        self.steps = self.tokens = self.sessions = 0
        self.seconds = 0.0

    def add(self, tokens: int, sessions: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.sessions += sessions
        self.seconds += seconds


PARTS = 24
"""Into which shared work is cut; each is taken by who is free."""


def work_shared(devices: Sequence[Device], seconds: float) -> None:
    """From inside a fiber: work that devices take parts of until none is left, all begun ones waited for."""
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
    """From inside a fiber: work for some seconds."""
    if seconds > 0.0:
        device.submit(seconds, current())
        pause()
