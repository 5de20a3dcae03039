"""The virtual clock: events in the order of their time, and fibers that sleep on it.

A fiber is code that was written to block, such as an engine's loop, run on a stack of its own: where the
real one would wait for a forward or a message, it pauses, and the timeline goes on with what happens
meanwhile. One fiber runs at a time and nothing depends on the machine, so that the same inputs give the
same run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from greenlet import getcurrent, greenlet

Call = Callable[[], None]


class Timeline:
    """Events by time; those of the same time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds."""
        self._events: list[tuple[float, int, Call]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        """The time, for code that wants a function."""
        return self.now

    def at(self, time: float, call: Call) -> None:
        """Call at a time, which is not before now."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), call))

    def after(self, seconds: float, call: Call) -> None:
        """Call in some seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until nothing is left to happen, or `until` holds."""
        while self._events and not until():
            self.now, _, call = heapq.heappop(self._events)
            call()


class Fiber:
    """Blocking code on a stack of its own; begins when it is first resumed."""

    def __init__(self, main: Call) -> None:
        self._stack = greenlet(main, parent=_timeline())

    def resume(self) -> None:
        """Go on behind the last pause until the next one; from the timeline only."""
        self._stack.switch()


def _timeline() -> greenlet:
    """The stack that the timeline runs on, to which every fiber returns."""
    found = getcurrent()
    while found.parent is not None:
        found = found.parent
    return found


def pause() -> None:
    """From inside a fiber: let the timeline go on until the fiber is resumed."""
    parent = getcurrent().parent
    assert parent is not None, "only a fiber can pause"
    parent.switch()


def current() -> Call:
    """What resumes the fiber that asks."""
    return getcurrent().switch


class Doorbell:
    """Where one fiber sleeps until somebody rings or time is up; a ring while it is awake is kept."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rung = False
        self._sleeper: Call | None = None
        self._sleeps = 0

    def ring(self) -> None:
        """Wake the fiber, at once in virtual time but after what runs now."""
        self._rung = True
        self._wake()

    def wait(self, seconds: float | None) -> None:
        """Sleep until a ring, at most `seconds` (None: for ever)."""
        if not self._rung and seconds != 0.0:
            self._sleeper = current()
            self._sleeps += 1
            if seconds is not None:
                sleep = self._sleeps
                self._timeline.after(seconds, lambda: self._time_up(sleep))
            pause()
        self._rung = False

    def _time_up(self, sleep: int) -> None:
        if sleep == self._sleeps:
            self._wake()

    def _wake(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            self._timeline.after(0.0, sleeper)
