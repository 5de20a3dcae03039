"""Processes that exchange messages. Sending and receiving take processor time, and links take time."""

from __future__ import annotations

from dataclasses import dataclass

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
        self.send_seconds = send_seconds
        self.receive_seconds = receive_seconds
        self.loop = Thread(timeline, core, rewarm_seconds)


@dataclass(slots=True)
class Link:
    """One direction of a stream: messages arrive in the order in which they were sent."""

    timeline: Timeline
    sender: Host
    receiver: Host
    delay: float = 0.0
    """Seconds that a message travels."""

    def send(self, deliver: Call) -> None:
        """Send a message; `deliver` is called when the receiver has read it."""
        self.sender.loop.do(self.sender.send_seconds, lambda: self._fly(deliver))

    def _fly(self, deliver: Call) -> None:
        receiver = self.receiver
        self.timeline.after(self.delay, lambda: receiver.loop.do(receiver.receive_seconds, deliver))
