"""The threads that share the work of a forward on the CPU.

`threads` of them belong to the service. Helpers run on cores that belong to others, such as the draft's.
While these cores are idle, helpers take part in every step. Otherwise they take part only in long steps, such
as a prompt or a large batch: the draft needs its core more. Parts are handed out one by one, and the pool
does not wait for a helper that has not begun when all parts are taken: a busy core does not delay the rest.
"""

from __future__ import annotations

import os
import weakref
from _thread import LockType
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, Thread
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from outrider.engine.cpu.panels import aligned
from outrider.protocol.errors import ConfigError

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], None]
HELPED_ROWS = 15
"""Rows from which on helpers join while their cores have other work. With drafts at work and one session,
helpers from 1 row on made AUTO slower on a Xeon with AMX: 0.95 (T = 0), 0.74 (T = 1) of the tokens/s."""


class WorkerPool:
    """`threads` threads for every step, and a helper pinned to each of `helper_cores` for long steps.

    One thread at a time may call it, and is a member itself.

    Raises:
        ConfigError: a helper cannot run on its core.
    """

    def __init__(self, threads: int = 1, helper_cores: Sequence[int] = ()) -> None:
        self._threads = threads
        members = [_Member("worker") for _ in range(threads - 1)]
        self._others = members + [_helper(core) for core in helper_cores]
        self._rooms: dict[int, tuple[Tensor, list[int]]] = {}
        self._grown = torch.empty(self.largest, 0, dtype=torch.uint8)
        self.helpers_idle = False
        """True while nothing else runs on the helpers' cores."""

    @property
    def largest(self) -> int:
        """Number of members including all helpers."""
        return 1 + len(self._others)

    def size(self, rows: int) -> int:
        """Number of members that work on `rows` rows."""
        return self.largest if self.helpers_idle or rows >= HELPED_ROWS else self._threads

    def room(self, size: int) -> list[int]:
        """Return the address of `size` bytes of scratch memory for each member. All products share it: one
        runs at a time."""
        if size not in self._rooms:
            rooms = aligned(torch.zeros(self.largest, -(-size // 64) * 64, dtype=torch.uint8))
            self._rooms[size] = rooms, [room.data_ptr() for room in rooms]
        return self._rooms[size][1]

    def room_that_grows(self, size: int) -> list[int]:
        """The same for sizes that follow the text, from 64 bytes on. A larger room takes the place of a
        smaller one: addresses are good until the next call."""
        if self._grown.shape[1] < size:
            self._grown = torch.empty(self.largest, 1 << (size - 1).bit_length(), dtype=torch.uint8)
        start, own = self._grown.data_ptr(), self._grown.shape[1]
        return [start + own * member for member in range(self.largest)]

    def share(self, size: int, parts: Sequence[_T], work: Callable[[int, _T], None]) -> None:
        """Call work(member, part) once for every part, on `size` members numbered from 0."""
        left = iter(parts)  # its next() is atomic

        def work_off(member: int) -> None:
            for part in left:
                work(member, part)

        others = self._others[: size - 1]
        for member, other in enumerate(others, 1):
            other.begin(partial(work_off, member))
        try:
            work_off(0)
        finally:
            begun = [other for other in others if not other.cancel()]
            errors = [error for other in begun if (error := other.wait()) is not None]
        if errors:
            raise errors[0]


class _Member:
    """A thread that does one job at a time. A lock wakes it: futures take longer
    (docs/history/performance.md).
    """

    def __init__(self, name: str) -> None:
        self._begun, self._done = Lock(), Lock()
        self._begun.acquire()
        self._done.acquire()
        self._jobs: list[_Job] = []
        self._errors: list[BaseException] = []
        arguments = self._begun, self._done, self._jobs, self._errors
        Thread(target=_work, args=arguments, name=name, daemon=True).start()
        weakref.finalize(self, self._begun.release)  # woken without a job, the thread ends

    def begin(self, job: _Job) -> None:
        """Hand over a job; `cancel` or `wait` has to follow."""
        self._jobs.append(job)
        self._begun.release()

    def cancel(self) -> bool:
        """Take the job back; False when it has begun."""
        if not self._begun.acquire(blocking=False):
            return False
        self._jobs.clear()
        return True

    def wait(self) -> BaseException | None:
        """Wait until the job is done; return what it raised."""
        self._done.acquire()
        return self._errors.pop() if self._errors else None


def _work(begun: LockType, done: LockType, jobs: list[_Job], errors: list[BaseException]) -> None:
    """Run the thread of a member. It holds no reference to the member, so that the member can be freed."""
    while begun.acquire() and jobs:
        try:
            jobs.pop()()
        except BaseException as error:  # the caller's to raise
            errors.append(error)
        done.release()


def _helper(core: int) -> _Member:
    """Start a thread on a core, and check that it runs there."""
    helper = _Member("helper")
    helper.begin(partial(os.sched_setaffinity, 0, {core}))
    if (error := helper.wait()) is not None:
        raise ConfigError(f"helper_cpus: core {core} cannot be used by this process; name others") from error
    return helper
