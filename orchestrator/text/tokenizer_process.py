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
from outrider.protocol.errors import Unavailable

COMMAND = (sys.executable, "-P", "-m", "orchestrator.text.tokenizing_worker")
ANSWER_SECONDS = 120.0
"""After so long without an answer the process is taken to hang. Its own bounds are of processor time."""
ROOT = Path(__file__).resolve().parents[2]


class TokenizerProcess:
    """A process that tokenizes for one tokenizer, one job after another."""

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
    async def start(cls, tokenizer: TextTokenizer, positions: int) -> TokenizerProcess:
        """Start it and hand it the tokenizer; `positions` are those of the context.

        Raises:
            Unavailable: this machine has no room for another process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _spawn(theirs)
        except OSError as error:
            ours.close()
            raise Unavailable(f"no process to tokenize long prompts can be started: {error}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        started = cls(process, reader, writer, tokenizer)
        started._send((tokenizer.files, positions))
        return started

    async def ask(self, job: Job) -> tuple[str, Any] | None:
        """What `tokenizing_worker.answer` says of a job; None: the process has ended, or hangs.

        One job at a time.
        """
        self._send(job)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
                kind, content, self.leaving = marshal.loads(await self._reader.readexactly(length))
        except (EOFError, OSError, TimeoutError):  # the first: IncompleteReadError
            return None
        return kind, content

    async def end(self) -> int:
        """End it, if it has not; its exit status, minus the signal's number after a signal."""
        self._writer.close()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)

    def _send(self, value: Any) -> None:
        """What cannot be written, because the process has ended, is not answered either; that says it."""
        with suppress(OSError, RuntimeError):  # the latter is uvloop's
            self._writer.write(frame(pickle.dumps(value)))


def _spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """The process, with its input and output on a socket.

    `subprocess` starts it with vfork. uvloop would fork, and what gRPC does in a child before it becomes
    another program aborts it under load. In a session of its own, Ctrl-C does not reach it before requests
    have drained.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        COMMAND,
        stdin=channel.fileno(),
        stdout=channel.fileno(),
        stderr=subprocess.DEVNULL,  # what a library says of a prompt belongs in no log
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
    )
