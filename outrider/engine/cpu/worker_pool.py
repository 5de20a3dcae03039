"""The threads that share the work of a forward on the CPU.

`threads` of them belong to the service. Helpers run on cores that belong to others, such as the draft's.
While these are idle, helpers take part in every step, else in long ones alone, a prompt or a large batch:
the draft needs its core more. Parts are handed out one by one, and a helper that has not begun when all are
taken is not waited for: a core that is busy does not hold up the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from outrider.engine.cpu.panels import aligned
from outrider.protocol.errors import ConfigError

_T = TypeVar("_T")
HELPED_ROWS = 15
"""Helpers join from so many rows on while their cores have other work. With drafts at work and one session,
helpers from 1 row on made AUTO slower on a Xeon with AMX: 0.95 (T = 0), 0.74 (T = 1) of the tokens/s."""


class WorkerPool:
    """`threads` for every step, and a helper pinned to each of `helper_cores` for long ones.

    For one calling thread at a time, which is a member itself.

    Raises:
        ConfigError: a helper cannot run on its core.
    """

    def __init__(self, threads: int = 1, helper_cores: Sequence[int] = ()) -> None:
        self._threads = threads
        members = [ThreadPoolExecutor(1, "worker") for _ in range(threads - 1)]
        self._others = members + [_helper(core) for core in helper_cores]
        self._rooms: dict[int, Tensor] = {}
        self.helpers_idle = False
        """Nothing else runs on the helpers' cores."""

    @property
    def largest(self) -> int:
        """Members with all helpers."""
        return 1 + len(self._others)

    def size(self, rows: int) -> int:
        """Members that work on `rows` rows."""
        return self.largest if self.helpers_idle or rows >= HELPED_ROWS else self._threads

    def room(self, size: int) -> list[int]:
        """The address of `size` bytes for each member, which all products share: one runs at a time."""
        if size not in self._rooms:
            self._rooms[size] = aligned(torch.zeros(self.largest, -(-size // 64) * 64, dtype=torch.uint8))
        return [room.data_ptr() for room in self._rooms[size]]

    def share(self, size: int, parts: Sequence[_T], work: Callable[[int, _T], None]) -> None:
        """Call work(member, part) once for every part, on `size` members numbered from 0."""
        left = iter(parts)  # its next() is atomic

        def work_off(member: int) -> None:
            for part in left:
                work(member, part)

        others = [other.submit(work_off, member) for member, other in enumerate(self._others[: size - 1], 1)]
        try:
            work_off(0)
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()


def _helper(core: int) -> ThreadPoolExecutor:
    """A thread on a core, and the proof that it runs there."""
    helper = ThreadPoolExecutor(1, "helper", _pin, (core,))
    try:
        helper.submit(int).result()
    except BrokenExecutor as error:
        raise ConfigError(f"helper_cpus: core {core} cannot be used by this process; name others") from error
    return helper


def _pin(core: int) -> None:
    """Keep the calling thread on a core."""
    os.sched_setaffinity(0, {core})
