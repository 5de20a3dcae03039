"""Shared memory in which the ranks of one machine show each other their parts of a sum.

Gloo moves data with threads of its own, which share a rank's core with its products. A sum of a few rows took
it 0.35 ms in the median and 4 ms in one of ten cases (two ranks, AMD Zen 4); here a rank only copies its part
and reads the others'.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.protocol.errors import ConfigError

MAX_BYTES = 1 << 20
"""Largest part. Larger ones belong to prompts, whose products take much longer than to move them."""
_LINE = 64
"""Bytes of a cache line: each rank's counter has one."""
_LOOKS = 1000
"""Looks at a counter between two looks at the clock."""


class Board:
    """The places of all ranks in a file that they share. One thread at a time may use it.

    Each rank has two places, which it uses in turn. It writes to one again only two rounds later, after the
    round between them has shown that all others have read it. A rank's counter says which round it has
    written. Processors whose stores other cores may see in another order must not use this: x86 keeps it.
    """

    def __init__(self, path: str, rank: int, size: int, *, seconds: float, check: Callable[[], None]) -> None:
        """The first rank to come makes the file. A wait of `seconds` ends in an error; `check` is called
        meanwhile and may raise.

        Raises:
            ConfigError: there is no room for the file.
        """
        self._rank, self._seconds, self._check = rank, seconds, check
        self._round = 0
        places = size * _LINE
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            _reserve(file.fileno(), places + 2 * size * MAX_BYTES, path)
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self._counters = memory[:places].view(np.int64)[:: _LINE // 8]
        self._places = torch.from_numpy(memory[places:]).view(2, size, MAX_BYTES)

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts, [ranks, *part.shape]; a part has at most MAX_BYTES. The result is valid
        until the next call.

        Raises:
            RuntimeError: a rank hangs.
        """
        self._round += 1
        used = self._places[self._round % 2, :, : part.nbytes].view(part.dtype)
        parts = used.view(len(used), *part.shape)
        parts[self._rank] = part
        self._counters[self._rank] = self._round
        self._wait()
        return parts

    def _wait(self) -> None:
        end = time.monotonic() + self._seconds
        while True:
            for _ in range(_LOOKS):
                if self._counters.min() >= self._round:
                    return
                os.sched_yield()  # other threads of this process and core go on meanwhile
            self._check()
            if time.monotonic() > end:
                raise RuntimeError(f"no part came in {self._seconds:g} s")


def _reserve(file: int, count: int, path: str) -> None:
    """Give a file `count` bytes of its own; a write to memory without room in the file ends the process."""
    try:
        os.posix_fallocate(file, 0, count)
    except OSError as error:
        raise ConfigError(
            f"tensor_parallel: {os.path.dirname(path)!r} has no room for {count >> 20} MiB "
            f"({error.strerror}); make room, or set TMPDIR"
        ) from error
