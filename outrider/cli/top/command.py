"""`outrider top`: looks at the pages again and again, and draws what happened in between."""

from __future__ import annotations

import argparse
import contextlib
import os
import time

from rich.console import Console
from rich.live import Live

from outrider.cli.top.frame import frame_of
from outrider.cli.top.pages import Sample, look
from outrider.cli.top.view import view
from outrider.protocol.errors import Unavailable

PLAIN_WIDTH = 120
"""Characters of a line where there is no terminal."""


def top(arguments: argparse.Namespace) -> int:
    """Draw until Ctrl-C, or one frame; returns the exit status.

    Raises:
        Unavailable: no page can be read at the beginning.
    """
    given = arguments.metrics or os.environ.get("OUTRIDER_METRICS", "").split() or [arguments.default]
    console = _console()
    first = _first(given)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        if arguments.once or not console.is_terminal:
            time.sleep(arguments.interval)
            console.print(view(frame_of(first, look(given))))
        else:
            _follow(given, first, arguments.interval, console)
    return 0


def _follow(given: list[str], before: Sample, interval: float, console: Console) -> None:
    with Live(view(frame_of(before, before)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = look(given)
            live.update(view(frame_of(before, now)), refresh=True)
            before = now


def _first(given: list[str]) -> Sample:
    sample = look(given)
    if not sample.pages:
        where, why = next(iter(sample.problems.items()))
        raise Unavailable(
            f"{where} {why}; start services with --metrics-port, or name their pages with --metrics"
        )
    return sample


def _console() -> Console:
    """A terminal as it is; elsewhere plain lines of a fixed width."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, no_color=True, width=PLAIN_WIDTH)
