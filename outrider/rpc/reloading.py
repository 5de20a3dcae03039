"""Values that are made from files, and made anew when the files change: certificates, tokens.

Files are renewed by writing over them, or by swapping a link as Kubernetes does. New contents are used only
if they are valid. Until then the old value stays, and each unusable content adds one log line and one count.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from outrider.protocol.errors import ConfigError
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
T = TypeVar("T")
Contents = dict[str, bytes]
"""Contents of the files, by the setting that names each."""
SETTLE_SECONDS = 1.0
"""Seconds for which files must be unusable to be reported; for a shorter time, they are being replaced."""
WATCH_SECONDS = 2.0
"""Seconds between two looks of `watch`."""
READS = 3
"""Number of attempts to read the files without a change during the reading."""


class Reloaded(Generic[T]):
    """A value that is made from files. Several threads may use it."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, str],
        make: Callable[[Contents], T],
        *,
        period: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`files` are paths by setting; `make` raises ConfigError for contents that cannot be used; `current`
        checks the files at most every `period` seconds of `clock`.

        Raises:
            ConfigError: the files cannot be used at the start.
        """
        self.name = name
        self.files = {setting: path for setting, path in files.items() if path}
        self.on_refused: Callable[[str], None] = lambda name: None
        """Called with the name when new contents cannot be used."""
        self._make = make
        self._period = period
        self._clock = clock
        self._lock = threading.Lock()
        self._contents, self._value = self._load(self._read())
        self._next_check = clock() + period
        self._problem: tuple[Contents | None, str] | None = None
        self._problem_since = 0.0
        self._complained = False

    @property
    def value(self) -> T:
        """The value at the last check."""
        return self._value

    def current(self) -> T:
        """The current value; it stays the same object while nothing changes."""
        with self._lock:
            now = self._clock()
            if now >= self._next_check:
                self._next_check = now + self._period
                self._reload(now)
            return self._value

    def _reload(self, now: float) -> None:
        contents: Contents | None = None
        try:
            contents = self._read()
            if contents != self._contents:
                self._contents, self._value = self._load(contents)
                logger.info("new files taken up", files=self.name)
        except ConfigError as error:
            self._note((contents, str(error)), now)
        else:
            self._problem = None

    def _note(self, problem: tuple[Contents | None, str], now: float) -> None:
        """Report a problem with the files, once, and only if it lasts longer than `SETTLE_SECONDS`."""
        if problem != self._problem:
            self._problem, self._problem_since, self._complained = problem, now, False
        if not self._complained and now - self._problem_since >= SETTLE_SECONDS:
            self._complained = True
            logger.error("new files cannot be used; keeping the old ones", files=self.name, error=problem[1])
            self.on_refused(self.name)

    def _load(self, contents: Contents) -> tuple[Contents, T]:
        """Contents that were read without a change in between, and their value."""
        for _ in range(READS):
            try:
                value = self._make(contents)
            except ConfigError:
                if (again := self._read()) == contents:
                    raise
            else:
                if (again := self._read()) == contents:
                    return contents, value
            contents = again
        raise ConfigError(f"{', '.join(self.files)}: the files change while they are read")

    def _read(self) -> Contents:
        return {setting: _read(setting, path) for setting, path in self.files.items()}


async def watch(watched: Iterable[Reloaded[Any]]) -> None:
    """Check files until cancelled, so that unusable ones are noticed before they are needed."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        for files in watched:
            files.current()


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path!r} ({error.strerror})") from error
