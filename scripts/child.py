"""A child process that speaks JSON lines: a service, a benchmark worker or a proxy.

It starts in a session of its own, so that Ctrl-C reaches only its parent, and `close` ends it with everything
that it started. Its standard error goes to a log file.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 600.0
"""Longest silence, in seconds, before the first line: a child may compile for minutes."""
END_SECONDS = 20.0


class ChildError(Exception):
    """A child process ended or fell silent; the message carries the end of its log."""


class Child:
    """One process; lines of its standard output that are no JSON objects are ignored."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        cpus: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        pinned = ["taskset", "--cpu-list", cpus] if cpus else []
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*pinned, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def receive(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The next JSON object that the process writes.

        Raises:
            ChildError: the process ended, or wrote nothing for `timeout` seconds.
        """
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            raise ChildError(f"no answer for {timeout:g} s\n{self._tail()}") from None
        if message is None:
            raise ChildError(f"ended with {self._process.wait()}\n{self._tail()}")
        return message

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line to its standard input.

        Raises:
            ChildError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(f"ended with {self._process.wait()}\n{self._tail()}") from None

    def ask(self, message: Mapping[str, Any], timeout: float = START_SECONDS) -> dict[str, Any]:
        """Send a message and return the answer."""
        self.send(message)
        return self.receive(timeout)

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process by SIGTERM, and its whole session by SIGKILL if it still runs after a while."""
        if self.running:
            self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    self._messages.put(message)
        self._messages.put(None)

    def _tail(self) -> str:
        return f"{self.log}:\n{self.log.read_text(errors='replace')[-2000:]}"
