"""What a command writes to standard error and to files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from outrider.protocol.errors import InvalidRequest


def say(sentence: str) -> None:
    """Print a line to standard error."""
    print(f"outrider: {sentence}", file=sys.stderr, flush=True)


def write_file(flag: str, path: str, text: str) -> None:
    """Write a file that a flag asks for.

    Raises:
        InvalidRequest: the file cannot be written; names the flag.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(flag, f"cannot write {path!r} ({error.strerror})") from error


def check_folder(flag: str, path: str) -> None:
    """Check that the folder of an output file exists, before the work begins.

    Raises:
        InvalidRequest: the file's folder is not there; names the flag.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InvalidRequest(flag, f"there is no folder {str(Path(path).parent)!r}")


def counter(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Callable[[float], None]:
    """A function to call with how much of `total` is done; it reports that, and the time left."""
    begun = clock()

    def done(so_far: float) -> None:
        left = (clock() - begun) * (total - so_far) / so_far if so_far else 0.0
        say(f"{what}: {so_far / total:.0%}, about {left:.0f} s left")

    return done
