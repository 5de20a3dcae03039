"""How the benchmarks talk and end: progress on standard error, one sentence for what went wrong."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from scripts.child import ChildError

INTERRUPTED = 130


def progress(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def command(module: str) -> str:
    """The command line that this process was started with."""
    return " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]])


def json_file(text: str) -> Path:
    """The file that a flag names for the result; pictures and logs lie beside it.

    Raises:
        argparse.ArgumentTypeError: it is not one, which would show only after everything has been measured.
    """
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} does not name a .json file")
    return path


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
