"""How benchmarks and scripts talk and end: progress on standard error, one sentence for what went wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from scripts.child import ChildError

INTERRUPTED = 130


def progress(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def run(main: Callable[[], int]) -> NoReturn:
    """Run to the exit status; Ctrl-C and SIGTERM end it like an error does, so that every process that was
    started ends too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        progress("interrupted")
        sys.exit(INTERRUPTED)
    except ChildError as error:
        progress(f"a process failed: {error}")
        sys.exit(1)
