"""What a command says on standard error and writes to files, beside what it prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from outrider.protocol.errors import InvalidRequest


def say(sentence: str) -> None:
    """A line."""
    print(f"outrider: {sentence}", file=sys.stderr, flush=True)


def write_file(flag: str, path: str, text: str) -> None:
    """Write what a flag asks for.

    Raises:
        InvalidRequest: the file cannot be written; names the flag.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(flag, f"cannot write {path!r} ({error.strerror})") from error


def check_folder(flag: str, path: str) -> None:
    """Before work begins whose result could not be written.

    Raises:
        InvalidRequest: the file's folder is not there; names the flag.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InvalidRequest(flag, f"there is no folder {str(Path(path).parent)!r}")


def counter(what: str, total: float, clock: Callable[[], float] = time.monotonic) -> Callable[[float], None]:
    """Call the result with how much of `total` is done: it says so, and how long the rest may take."""
    begun = clock()

    def done(so_far: float) -> None:
        left = (clock() - begun) * (total - so_far) / so_far if so_far else 0.0
        say(f"{what}: {so_far / total:.0%}, about {left:.0f} s left")

    return done
