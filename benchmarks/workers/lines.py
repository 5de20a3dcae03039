"""Shared by all workers; needs only the standard library, as a peer's Python has only the peer's packages.

A worker reads {"prompts", "tokens", "temperature", "seed", ...} per line and answers
{"requests": [{"tokens", "arrivals": [[seconds, count], ...], "passes"}, ...]}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

Ask = dict[str, Any]
Answer = dict[str, Any]


class Recorder:
    """The deliveries of one request; times count from `started` of `time.perf_counter`."""

    def __init__(self, started: float) -> None:
        self.tokens: list[int] = []
        self.arrivals: list[tuple[float, int]] = []
        self._started = started

    def add(self, tokens: Sequence[int]) -> None:
        """Note tokens that arrive now."""
        if tokens:
            self.tokens += tokens
            self.arrivals.append((time.perf_counter() - self._started, len(tokens)))

    def answer(self) -> Answer:
        """The request as part of a worker's answer."""
        return {"tokens": self.tokens, "arrivals": self.arrivals}


def private_output() -> TextIO:
    """Return standard output, only for answers: from now on, what libraries print goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def serve(output: TextIO, versions: Answer, run: Callable[[Ask], Sequence[Recorder]]) -> None:
    """Answer until standard input ends; the first line says that the worker is ready, and its versions."""
    _write(output, {"event": "ready", "versions": versions})
    for line in sys.stdin:
        _write(output, {"requests": [recorder.answer() for recorder in run(json.loads(line))]})


def _write(output: TextIO, message: Answer) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()
