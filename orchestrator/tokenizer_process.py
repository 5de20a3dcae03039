"""The orchestrator's side of `tokenizing_worker`: starts the process, asks it, ends it."""

from __future__ import annotations

import asyncio
import marshal
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.tokenizer import TextTokenizer
from orchestrator.tokenizing_worker import LENGTH_BYTES, frame
from outrider.errors import Unavailable

ANSWER_SECONDS = 120.0
"""After so long without an answer the process is taken to hang. Its own bounds are of processor time."""
ROOT = Path(__file__).resolve().parents[1]


class TokenizerProcess:
    """A process that tokenizes for one tokenizer; a `Worker` of `orchestrator.tokenizing`."""

    def __init__(self, process: asyncio.subprocess.Process, tokenizer: TextTokenizer) -> None:
        self._process = process
        self.tokenizer = tokenizer
        self.leaving = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(cls, tokenizer: TextTokenizer, positions: int) -> TokenizerProcess:
        """Start it, in a session of its own so that Ctrl-C does not reach it before requests have drained.

        Raises:
            Unavailable: this machine has no room for another process.
        """
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "orchestrator.tokenizing_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # what a library says of a prompt belongs in no log
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise Unavailable(f"no process to tokenize long prompts can be started: {error}") from error
        started, files = cls(process, tokenizer), tokenizer.files
        started._send(
            files.tokenizer_json, files.chat_template, files.special_tokens, files.bos_token_id, positions
        )
        return started

    async def ask(self, prompt: tuple[str, Any]) -> tuple[str, Any] | None:
        """What `tokenizing_worker.answer` says of a prompt; None: the process has ended, or hangs.

        `leaving` then says whether it ends after this answer. One prompt at a time.
        """
        self._send(*prompt)
        output = self._process.stdout
        assert output is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                length = int.from_bytes(await output.readexactly(LENGTH_BYTES), "little")
                kind, content, self.leaving = marshal.loads(await output.readexactly(length))
        except (EOFError, OSError, TimeoutError):  # the first: IncompleteReadError
            return None
        return kind, content

    async def end(self) -> int:
        """End it, if it has not; its exit status, minus the signal's number after a signal."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    def _send(self, *value: Any) -> None:
        """Into memory: what cannot be written, because the process has ended, is not read either."""
        assert self._process.stdin is not None
        self._process.stdin.write(frame(value))
