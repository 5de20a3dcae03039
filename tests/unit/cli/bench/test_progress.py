"""The line about a load that runs."""

from __future__ import annotations

import io

from outrider.cli.bench.generator import Clock, LoadTally
from outrider.cli.bench.progress import CLEAR, LOG_SECONDS, line, shown
from outrider.protocol.errors import Unavailable
from tests.unit.cli.bench.worlds import outcome, run_virtual


class Terminal(io.StringIO):
    """Somebody looks."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def told(out: io.StringIO, seconds: float) -> str:
    """What is written while a load runs for so long."""

    async def main(clock: Clock) -> None:
        async with shown("measuring", LoadTally(begun=2), 4, clock, out):
            await clock.sleep(seconds)

    run_virtual(main)
    return out.getvalue()


def test_the_line() -> None:
    """Ended, running, failed, and for how long."""
    tally = LoadTally(3, [outcome(), outcome(error=Unavailable("gone"))])
    assert line("measuring", tally, 8, 12.3) == "measuring: 2/8 requests, 1 running, 1 failed, 12 s"


def test_a_log_gets_a_line_now_and_then() -> None:
    """Nothing of a short load."""
    assert told(io.StringIO(), LOG_SECONDS / 2) == ""
    assert told(io.StringIO(), LOG_SECONDS * 2.5).splitlines() == [
        "measuring: 0/4 requests, 2 running, 5 s",
        "measuring: 0/4 requests, 2 running, 10 s",
    ]


def test_a_terminal_has_one_line_that_goes_away() -> None:
    """The report stands alone."""
    text = told(Terminal(), 1.1)
    assert "\n" not in text
    assert f"{CLEAR}measuring: 0/4 requests, 2 running, 1 s" in text
    assert text.endswith(CLEAR)
