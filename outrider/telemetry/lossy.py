"""A stream of lines that never ends or stops a service."""

from __future__ import annotations

import select
from contextlib import suppress
from typing import TextIO

FULL_SECONDS = 1.0
"""Longest wait for a reader that has stopped, as when a terminal or `outrider up` is stopped. Until it reads
again, nothing waits any more."""


class Lossy:
    """Drops lines that it cannot write: the disk is full, or nobody reads the pipe.

    One that does not fit into a page of a pipe, 4096 bytes, may still wait.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read = True
        """Somebody read when the last line came."""
        self._number: int | None = None
        with suppress(OSError):  # it is no file, as in tests
            self._number = stream.fileno()

    def write(self, text: str) -> None:
        """Write whole lines, or drop them."""
        with suppress(OSError):
            if self._number is not None:
                _, free, _ = select.select([], [self._number], [], FULL_SECONDS if self._read else 0)
                self._read = bool(free)
            if self._read:
                self._stream.write(text)

    def flush(self) -> None:
        """Flush as far as possible."""
        if self._read:
            with suppress(OSError):
                self._stream.flush()
