"""Processes that exchange messages: each spends processor time on sending and receiving, links take time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from simulator.devices import Device, Thread
from simulator.timeline import Call, Timeline


class Host:
    """The event loop of one process on its core."""

    def __init__(
        self,
        timeline: Timeline,
        core: Device,
        send_seconds: float = 0.0,
        receive_seconds: float = 0.0,
        rewarm_seconds: float = 0.0,
    ) -> None:
        self.core = core
        self.send_seconds = send_seconds
        self.receive_seconds = receive_seconds
        self.loop = Thread(timeline, core, rewarm_seconds)


@dataclass(slots=True)
class Link:
    """One direction of a stream: messages arrive in the order in which they were sent."""

    timeline: Timeline
    sender: Host
    receiver: Host
    delay: Callable[[], float]
    """Seconds on the way, drawn anew for every message."""
    _last: float = field(default=0.0)

    def send(self, deliver: Call) -> None:
        """Send a message; `deliver` is called when the receiver has read it."""
        self.sender.loop.do(self.sender.send_seconds, lambda: self._fly(deliver))

    def _fly(self, deliver: Call) -> None:
        self._last = max(self.timeline.now + self.delay(), self._last)
        self.timeline.at(self._last, lambda: self.receiver.loop.do(self.receiver.receive_seconds, deliver))
