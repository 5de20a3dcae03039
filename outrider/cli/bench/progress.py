"""Shows the progress of a load on standard error."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TextIO

from outrider.cli.bench.generator import Clock, LoadTally

TERMINAL_SECONDS = 0.2
"""Seconds between two updates of the line on a terminal."""
LOG_SECONDS = 5.0
"""Seconds between two lines where standard error is no terminal, and no line can be overwritten."""
CLEAR = "\r\x1b[K"


def line(what: str, tally: LoadTally, total: int, seconds: float) -> str:
    """Such as `measuring: 12/32 requests, 4 running, 31 s`."""
    failed = f", {tally.failed} failed" if tally.failed else ""
    return f"{what}: {len(tally.outcomes)}/{total} requests, {tally.open} running{failed}, {seconds:.0f} s"


@asynccontextmanager
async def shown(
    what: str, tally: LoadTally, total: int, clock: Clock, out: TextIO | None = None
) -> AsyncGenerator[None, None]:
    """Show a line about the load while it runs, every now and then."""
    task = asyncio.create_task(_show(what, tally, total, clock, out or sys.stderr))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _show(what: str, tally: LoadTally, total: int, clock: Clock, out: TextIO) -> None:
    start, terminal = clock.now(), out.isatty()
    try:
        while True:
            await clock.sleep(TERMINAL_SECONDS if terminal else LOG_SECONDS)
            text = line(what, tally, total, clock.now() - start)
            print(f"{CLEAR}{text}" if terminal else text, end="" if terminal else "\n", file=out, flush=True)
    finally:
        if terminal:
            print(CLEAR, end="", file=out, flush=True)
