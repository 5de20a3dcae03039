"""Chooses the continuations that are kept, and lets a thread write them: the event loop does not wait.

What cannot be written is lost and counted. Requests go on all the same.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from orchestrator.collecting.files import RotatedFiles
from orchestrator.request.resolver import ResolvedRequest
from outrider.collected import Collected
from outrider.config import OrchestratorConfig
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
MAX_WAITING = 256
"""Most continuations that wait to be written. Further ones are dropped."""


class Collector:
    """Keeps about a `share` of the continuations that it is offered."""

    def __init__(
        self, files: RotatedFiles, share: float, collected: Counter, draw: Callable[[], float] = random.random
    ) -> None:
        """`collected` counts continuations by outcome; `draw` returns numbers in [0, 1)."""
        self._files = files
        self._share = share
        self._collected = collected
        self._draw = draw
        self._waiting: queue.Queue[Collected | None] = queue.Queue(MAX_WAITING)
        self._complained = False
        self._writer = threading.Thread(target=self._write_all, name="collector", daemon=True)
        self._writer.start()

    @classmethod
    def configure(cls, config: OrchestratorConfig, collected: Counter) -> Collector | None:
        """The collector that the settings ask for; None by default.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if not config.collect:
            return None
        files = RotatedFiles(config.collect, config.collect_max_mb << 20)
        return cls(files, config.collect_share, collected)

    def offer(self, request: ResolvedRequest, tokens: Sequence[int]) -> None:
        """Take in a continuation that has ended: `tokens` are its prompt and what was served. Never waits."""
        prompt = len(request.prompt)
        if request.do_not_collect or len(tokens) <= prompt or self._draw() >= self._share:
            return
        kept = Collected(request.served.vocabulary_hash, request.task, prompt, tuple(tokens))
        try:
            self._waiting.put_nowait(kept)
        except queue.Full:
            self._collected.labels("dropped").inc()

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits and end the thread; wait at most `seconds` for each of the two."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._writer.join(seconds)

    def _write_all(self) -> None:
        while (kept := self._waiting.get()) is not None:
            self._collected.labels(self._write(kept)).inc()
        self._files.close()

    def _write(self, kept: Collected) -> str:
        """Write one continuation; return the outcome."""
        try:
            written = self._files.write(kept.line())
        except OSError as error:
            if not self._complained:
                logger.warning("collected tokens cannot be written; requests go on", error=error.strerror)
            self._complained = True
            return "failed"
        self._complained = False
        return "written" if written else "dropped"
