"""The command lines of benchmarks and scripts: flags, progress, and one sentence for an error."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from outrider.protocol.errors import OutriderError
from scripts.child import ChildError

INTERRUPTED = 130


def new_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's documentation."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def progress(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def run(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with its status. Ctrl-C, SIGTERM and a closed terminal end it like an error, so
    that every process that it started ends too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        progress("interrupted")
        sys.exit(INTERRUPTED)
    except ChildError as error:
        progress(f"a process failed: {error}")
        sys.exit(1)
    except (OutriderError, OSError) as error:
        progress(str(error))
        sys.exit(1)
