"""Writes lines into files of one folder that together stay below a size.

Its functions block, so they run in a thread of their own.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from outrider.collected import PATTERN, make_folder

FILES = 8
"""Number of files that the allowed size is divided into. The oldest is deleted to make room for a new one."""
NUMBER = re.compile(r"(?<=-)\d{15}(?=-)")
"""The number in a file's name; files are in the order of their numbers."""


class RotatedFiles:
    """Appends lines to the newest file. Processes may share the folder, each with files of its own."""

    def __init__(
        self, folder: str, max_bytes: int, unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        """Raises ConfigError when the folder cannot be made or written to."""
        self._folder = make_folder(folder)
        self._max_bytes = max_bytes
        self._unix_ms = unix_ms
        self._own = secrets.token_hex(4)
        self._path = self._folder
        """Path of the newest file, once there is one."""
        self._file: BinaryIO | None = None
        self._size = 0

    def write(self, line: str) -> bool:
        """Append one line; return False for one that is larger than a whole file may be, which is dropped.

        Raises:
            OSError: it could not be written, for example because the disk is full; the next line goes to a
                new file.
        """
        data, max_file_bytes = line.encode(), self._max_bytes // FILES
        if len(data) > max_file_bytes:
            return False
        try:
            if self._file is None or self._size + len(data) > max_file_bytes or self._is_gone(self._file):
                self._begin(max_file_bytes)
            assert self._file is not None
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(data)
        except OSError:
            self.close()  # a line that was cut off stays the end of its file
            raise
        return True

    def close(self) -> None:
        """Close the newest file. One that took nothing is deleted, so that a full disk gets no more files."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what was written is written
                file.close()
                if _size(self._path) == 0:
                    self._path.unlink(missing_ok=True)

    def _is_gone(self, file: BinaryIO) -> bool:
        """Whether another process has deleted or moved the newest file."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return True

    def _begin(self, max_file_bytes: int) -> None:
        self.close()
        self._make_room(self._max_bytes - max_file_bytes)
        self._path = self._folder / PATTERN.replace("*", f"{self._number():015d}-{self._own}")
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.fdopen(os.open(self._path, mode, 0o600), "wb", buffering=0)
        self._size = 0

    def _number(self) -> int:
        """The time in Unix ms, or one more than the newest file's number if the clock was set back."""
        numbers = (NUMBER.search(path.name) for path in self._folder.glob(PATTERN))
        return max([self._unix_ms(), *(int(found[0]) + 1 for found in numbers if found)])

    def _make_room(self, max_bytes: int) -> None:
        """Delete the oldest files until the others have at most `max_bytes` together."""
        sizes = {path: _size(path) for path in sorted(self._folder.glob(PATTERN))}  # oldest first
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _size(path: Path) -> int:
    """Size of a file in bytes; 0 when another process has deleted it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
