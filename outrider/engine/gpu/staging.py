"""Memory of the host that the words of steps are sent to the device from.

A copy from pinned memory returns before the device has read the memory. Pinning takes longer than planning a
short step. So the steps of graphs are written into a few buffers, which are pinned once and taken in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.gpu.plan import Words, new_words

BUFFERS = 4
"""How many steps can be on their way before the host waits for the device to read the first of them."""


class Event(Protocol):
    """A place in the work of a device, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Move the place after all work that the current stream of the current device has been given."""

    def synchronize(self) -> None:
        """Wait until the device is past the place; return at once if nothing was recorded."""


class _Buffer(NamedTuple):
    """Memory for a step, and the event after its last copy."""

    memory: Tensor
    words: Words
    """`memory` as an array."""
    was_read: Event


class Staging:
    """Buffers that are written again only after the device has read them."""

    def __init__(
        self, size: int, device: torch.device, make_event: Callable[[], Event] | None = None
    ) -> None:
        """Make buffers of `size` words. Nothing is pinned unless the device is CUDA's. `make_event` makes
        the device's events; there are none by default for other devices, whose copies return when they are
        done.
        """
        pinned = device.type == "cuda"
        make_event = make_event or (torch.cuda.Event if pinned else _NoEvent)
        buffers = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(BUFFERS)]
        self._size = size
        self._buffers = cycle([_Buffer(each, each.numpy(), make_event()) for each in buffers])
        self._last = next(self._buffers)

    def room(self, count: int) -> Words:
        """Return memory for `count` words, whose values are arbitrary: the front of the next buffer, or new
        memory if the buffers are too short.
        """
        if count > self._size:
            return new_words(count)
        self._last = next(self._buffers)
        self._last.was_read.synchronize()
        return self._last.words[:count]

    def send(self, count: int, target: Tensor) -> None:
        """Copy the first `count` words of the last buffer that `room` returned to the front of `target`.

        The thread's current device has to be that of `target`. Returns before the device has read them.
        """
        target[:count].copy_(self._last.memory[:count], non_blocking=True)
        self._last.was_read.record()


def send_once(words: Words, target: Tensor) -> None:
    """Copy words of any number to a target [words] on the device, by way of new pinned memory.

    Torch uses such memory again only after the device has read it.
    """
    source = torch.from_numpy(words)
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


class _NoEvent:
    """An event of a device that has done everything when a call returns."""

    def record(self) -> None:
        """See Event."""

    def synchronize(self) -> None:
        """See Event."""
