"""A supervised child process: `outrider serve ...` with its output shown line by line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from outrider.cli.up.plan import ChildSpec

MAX_LINE = 1 << 20
"""Most bytes of a line that is read from a child."""
ERROR = "outrider: "
"""The beginning of the sentence with which the command fails."""
LOOK_SECONDS = 0.2
"""Seconds between looks at whether the process has ended."""
LAST_LINES_SECONDS = 1.0
"""Longest wait for the last lines of a process that has ended. One that it had started, such as a rank that
hangs, may keep its streams open."""


class SupervisedChild:
    """One running process. `ready` becomes its ready line; `problem` its error sentence, or its last line if
    it has none."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, show: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.problem = ""
        self._process = process
        self._show = show
        self._end = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls, spec: ChildSpec, config_file: str | None, show: Callable[[str], None]
    ) -> SupervisedChild:
        """Start the process in a session of its own, so that Ctrl-C only reaches its parent."""
        command = ["-m", "outrider", "serve", spec.service, *spec.arguments, "--parent-pid", str(os.getpid())]
        if config_file:
            command += ["--config", config_file]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=spec.sockets,
            limit=MAX_LINE,
        )
        return cls(spec, process, show)

    async def wait(self) -> int:
        """The exit status, after what the process wrote has been shown; several tasks may wait."""
        return await asyncio.shield(self._end)

    def send(self, number: signal.Signals) -> None:
        """Send a signal if it still runs."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _run(self) -> int:
        reading = asyncio.gather(self._read_output(), self._read_log())
        while self._process.returncode is None and not reading.done():
            await asyncio.wait([reading], timeout=LOOK_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_SECONDS):
                await reading
        status = self._process.returncode
        if status is None:
            status = await self._process.wait()  # on Python 3.11 only once its streams are closed
        self.ready.cancel()
        return status

    async def _read_output(self) -> None:
        async for line in _lines(self._process.stdout):
            event = _event(line)
            if event.get("event") == "ready" and not self.ready.done():
                self.ready.set_result(event)

    async def _read_log(self) -> None:
        async for line in _lines(self._process.stderr):
            text = line.decode(errors="replace").rstrip()
            if text.startswith(ERROR) or not self.problem.startswith(ERROR):
                self.problem = text
            self._show(text)


async def _lines(stream: asyncio.StreamReader | None) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream; of a line longer than `MAX_LINE`, at most the end."""
    assert stream is not None
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # the stream has dropped what it had read of such a line
            continue
        if not line:
            return
        yield line


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
