"""The host's memory that steps are sent from, with a device that reads when it is told to."""

from __future__ import annotations

import torch

from outrider.engine.gpu.staging import Staging

CPU = torch.device("cpu")


class Device:
    """Reads what was sent when the host waits for it."""

    def __init__(self) -> None:
        self.unread: list[Place] = []
        self.waits = 0

    def event(self) -> Place:
        """Return an event of this device."""
        return Place(self)


class Place:
    """An event behind which the device has nothing left to read."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        """See Event."""
        assert self not in self._device.unread, "the memory was written before the device had read it"
        self._device.unread.append(self)

    def synchronize(self) -> None:
        """See Event."""
        unread = self._device.unread
        if self in unread:
            self._device.waits += 1
            del unread[: unread.index(self) + 1]


def step(staging: Staging, target: torch.Tensor, value: int) -> int:
    """Send three words with this value; returns where they were."""
    words = staging.room(3)
    words[:] = value
    staging.send(3, target)
    return words.ctypes.data


def test_memory_that_is_still_being_read_is_not_written():
    """The host writes several steps in advance, and waits before it takes a buffer again."""
    device, target = Device(), torch.zeros(8, dtype=torch.int64)
    staging = Staging(8, CPU, device.event)
    first, places = step(staging, target, 0), []
    while not device.waits:
        places.append(step(staging, target, 1))
    assert len(places) > 1
    assert places[-1] == first
    assert first not in places[:-1]


def test_what_is_sent_arrives():
    """At the front of the target, and nothing behind it is touched."""
    target = torch.zeros(5, dtype=torch.int64)
    staging = Staging(4, CPU)
    for value in range(1, 10):
        step(staging, target, value)
        assert target.tolist() == [value] * 3 + [0, 0]


def test_words_that_fit_no_buffer_get_new_memory():
    """No wait is needed for it, and the buffers stay as they are."""
    device, target = Device(), torch.zeros(8, dtype=torch.int64)
    staging = Staging(4, CPU, device.event)
    step(staging, target, 7)
    staging.room(9)[:] = 8
    assert len(staging.room(9)) == 9
    assert device.waits == 0
    assert target.tolist() == [7] * 3 + [0] * 5
