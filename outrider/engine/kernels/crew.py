"""The threads that share the work of a forward on the CPU.

A short step waits for the memory, which one thread keeps busy. A long one, a prompt or a large batch, is
arithmetic: then helpers on cores that belong to others, such as the draft's, take their part of it. Parts
are handed out one by one, and a helper that has not begun when all are taken is not waited for: a core that
is busy does not hold up the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor, wait
from typing import TypeVar

from outrider.errors import ConfigError

_T = TypeVar("_T")
LONG_ROWS = 14
"""Helpers join from more rows on: up to here the time is that of the weights' way from the memory."""


class Crew:
    """`threads` for every step, and a helper pinned to each of `helper_cores` for long ones.

    For one calling thread at a time, which is a member itself.

    Raises:
        ConfigError: a helper cannot run on its core.
    """

    def __init__(self, threads: int = 1, helper_cores: Sequence[int] = ()) -> None:
        self._threads = threads
        members = [ThreadPoolExecutor(1, "crew") for _ in range(threads - 1)]
        self._others = members + [_helper(core) for core in helper_cores]

    @property
    def largest(self) -> int:
        """Members with all helpers."""
        return 1 + len(self._others)

    def size(self, rows: int) -> int:
        """Members that work on `rows` rows."""
        return self.largest if rows > LONG_ROWS else self._threads

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
