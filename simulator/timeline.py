"""The virtual clock: events in the order of their time, and fibers that sleep on it.

A fiber runs code that was written to block, such as an engine's loop, on a stack of its own. Where the real
code would wait for a forward or a message, the fiber pauses, and the timeline goes on with other events. One
fiber runs at a time and nothing depends on the machine, so the same inputs always give the same run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from greenlet import getcurrent, greenlet

Call = Callable[[], None]


class Timeline:
    """Events by time; events of the same time happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds."""
        self._events: list[tuple[float, int, Call]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        """The time, for code that needs a function."""
        return self.now

    def at(self, time: float, call: Call) -> None:
        """Call `call` at a time; now, if the time has passed."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), call))

    def after(self, seconds: float, call: Call) -> None:
        """Call `call` in some seconds."""
        self.at(self.now + seconds, call)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until no event is left, or `until` returns true."""
        while self._events and not until():
            self.now, _, call = heapq.heappop(self._events)
            call()


class Fiber:
    """Blocking code on a stack of its own; begins when it is first resumed."""

    def __init__(self, main: Call) -> None:
        self._stack = greenlet(main, parent=_timeline())

    def resume(self) -> None:
        """Go on from the last pause to the next one. Only the timeline may call this."""
        self._stack.switch()


def _timeline() -> greenlet:
    """The stack that the timeline runs on, to which every fiber returns."""
    found = getcurrent()
    while found.parent is not None:
        found = found.parent
    return found


def pause() -> None:
    """Let the timeline go on until this fiber is resumed. To be called in a fiber."""
    parent = getcurrent().parent
    assert parent is not None, "only a fiber can pause"
    parent.switch()


def current() -> Call:
    """The function that resumes the current fiber."""
    return getcurrent().switch


class Doorbell:
    """Lets one fiber sleep until a ring or a timeout. A ring while it is awake is kept."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rung = False
        self._sleeper: Call | None = None
        self._sleeps = 0

    def ring(self) -> None:
        """Wake the fiber now in virtual time, but after the code that is running."""
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
