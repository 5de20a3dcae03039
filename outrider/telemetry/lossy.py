"""A stream for log lines: what goes wrong with it never ends or stops a service."""

from __future__ import annotations

import select
from contextlib import suppress
from typing import TextIO

FULL_SECONDS = 1.0
"""Longest wait for a reader that has stopped, as when a terminal or `outrider up` is stopped. Later lines do
not wait until it reads again."""


class Lossy:
    """Drops lines that it cannot write: the disk is full, or nobody reads the pipe.

    A line above 4096 bytes, a page of a pipe, may still wait.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_reader = True
        """False if the last line did not fit into the pipe."""
        self._number: int | None = None
        with suppress(OSError):  # a stream in memory, as in tests, has none
            self._number = stream.fileno()

    def write(self, text: str) -> None:
        """Write whole lines, or drop them."""
        with suppress(OSError):
            if self._number is not None:
                _, free, _ = select.select([], [self._number], [], FULL_SECONDS if self._has_reader else 0)
                self._has_reader = bool(free)
            if self._has_reader:
                self._stream.write(text)

    def flush(self) -> None:
        """Flush as far as possible."""
        if self._has_reader:
            with suppress(OSError):
                self._stream.flush()
