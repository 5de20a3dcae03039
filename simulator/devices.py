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

    busy: float
    """Seconds of work done or begun."""

    def submit(self, seconds: float, done: Call) -> None:
        """Work for some seconds, then call."""


class Accelerator:
    """One piece of work after the other, in the order in which they came."""

    def __init__(self, timeline: Timeline) -> None:
        self.busy = 0.0
        self._timeline = timeline
        self._free_at = 0.0

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        start = max(self._timeline.now, self._free_at)
        self._free_at = start + seconds
        self.busy += seconds
        self._timeline.at(self._free_at, done)


class Core:
    """A processor core whose work all goes on at once, each at its share of the speed (processor sharing).

    `_progress` is the work that a job present since the beginning would have got.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.busy = 0.0
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
        self.busy += seconds
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
        self.busy = 0.0
        self._cores = list(cores)

    def submit(self, seconds: float, done: Call) -> None:
        """See Device."""
        self.busy += seconds
        core = min(self._cores, key=lambda core: core.jobs)
        self._cores.remove(core)
        self._cores.append(core)
        core.submit(seconds, done)


class Thread:
    """A queue of small jobs on a device, such as an event loop: one after the other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiting: deque[tuple[float, Call]] = deque()
        self._working = False

    def do(self, seconds: float, then: Call) -> None:
        """Work for some seconds after all that waits, then call."""
        self._waiting.append((seconds, then))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._waiting)
        if self._working:
            seconds, then = self._waiting.popleft()
            self._device.submit(seconds, lambda: self._done(then))

    def _done(self, then: Call) -> None:
        then()
        self._next()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs: its forwards, and its own code."""

    device: Device
    core: Device


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


def work(device: Device, seconds: float) -> None:
    """From inside a fiber: work for some seconds."""
    if seconds > 0.0:
        device.submit(seconds, current())
        pause()
