"""The orchestrator's side of `tokenizing_worker`: starts the process, asks it, ends it."""

from __future__ import annotations

import asyncio
import marshal
import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.text.jobs import Job
from orchestrator.text.tokenizer import TextTokenizer
from orchestrator.text.tokenizing_worker import LENGTH_BYTES, frame
from outrider.process import helpers_keep_running
from outrider.protocol.errors import Unavailable

COMMAND = (sys.executable, "-P", "-m", "orchestrator.text.tokenizing_worker")
ANSWER_SECONDS = 120.0
"""Seconds without an answer after which the process counts as hung. Its own bounds limit processor time."""
ROOT = Path(__file__).resolve().parents[2]


class TokenizerProcess:
    """A process that does the jobs of one tokenizer, one after another."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        tokenizer: TextTokenizer,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.tokenizer = tokenizer
        self.leaving = False
        """True when the process ends after its last answer."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(cls, tokenizer: TextTokenizer) -> TokenizerProcess:
        """Start the process and send it the tokenizer.

        Raises:
            Unavailable: this machine has no room for another process.
        """
        try:
            ours, process = _spawn()
        except OSError as error:
            raise Unavailable(f"no process to tokenize long prompts can be started: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        started = cls(process, reader, writer, tokenizer)
        started._send(tokenizer.files)
        return started

    async def ask(self, job: Job, positions: int) -> tuple[str, Any] | None:
        """What `tokenizing_worker.answer` returns for a job; None when the process has ended, or hangs.

        Ask for one job at a time.
        """
        self._send((job, positions))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
                kind, content, self.leaving = marshal.loads(await self._reader.readexactly(length))
        except (EOFError, OSError, TimeoutError):  # EOFError: IncompleteReadError
            return None
        return kind, content

    async def end(self) -> int:
        """End the process if it runs; return its exit status, which is negative after a signal."""
        self._writer.close()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)

    def _send(self, value: Any) -> None:
        """Write a value. Errors are ignored: if the process has ended, `ask` gets no answer either."""
        with suppress(OSError, RuntimeError):  # uvloop raises the latter
            self._writer.write(frame(pickle.dumps(value)))


def _spawn() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process, with its input and output on a socket; returns the other end too.

    `subprocess` starts it with vfork. uvloop would use fork, and under load gRPC's code in the child aborts
    it before it becomes another program.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, _started(theirs.fileno())
        except OSError:
            ours.close()
            raise


def _started(channel: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with helpers_keep_running():
        return subprocess.Popen(
            COMMAND,
            stdin=channel,
            stdout=channel,
            stderr=subprocess.DEVNULL,  # a library's output about a prompt must not be logged
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
