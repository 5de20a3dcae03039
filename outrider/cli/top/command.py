"""`outrider top`: reads the pages repeatedly, and draws what happened between two readings."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from outrider.cli.commands import METRICS
from outrider.cli.top.frame import frame_of
from outrider.cli.top.pages import Snapshot, read_snapshot
from outrider.cli.top.view import view
from outrider.protocol.errors import Unavailable

PLAIN_WIDTH = 120
"""Characters of a line where there is no terminal."""


def top(arguments: argparse.Namespace) -> int:
    """Draw until Ctrl-C or SIGTERM, or one frame; returns the exit status: 1 if the frame shows no service.

    Raises:
        Unavailable: no page can be read at the beginning.
    """
    given = arguments.metrics or (os.environ.get("OUTRIDER_METRICS") or METRICS).split()
    console = _console()
    first = _first(given)
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        if arguments.once or not console.is_terminal:
            time.sleep(arguments.interval)
            frame = frame_of(first, read_snapshot(given))
            console.print(view(frame))
            return 0 if frame.requests or frame.replicas else 1
        _follow(given, first, arguments.interval, console)
    return 0


def _follow(given: list[str], before: Snapshot, interval: float, console: Console) -> None:
    live = Live(view(frame_of(before, before)), console=console, screen=True, auto_refresh=False)
    on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the screen would be kept
    try:
        live.start(refresh=True)  # a context manager would keep the screen if Ctrl-C came in here
        while True:
            time.sleep(interval)
            now = read_snapshot(given)
            live.update(view(frame_of(before, now)), refresh=True)
            before = now
    finally:
        live.stop()
        signal.signal(signal.SIGTERM, on_term)


def _first(given: list[str]) -> Snapshot:
    snapshot = read_snapshot(given)
    if not snapshot.pages:
        where, why = next(iter(snapshot.problems.items()))
        raise Unavailable(
            f"{where} {why}; start services with --metrics-port, or name their pages with --metrics"
        )
    return snapshot


def _console() -> Console:
    """A console for a terminal; for other outputs, one that prints plain lines of a fixed width."""
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # labels are the callers'
    console = Console(**plain)
    return console if console.is_terminal else Console(**plain, no_color=True, width=PLAIN_WIDTH)
