"""Flags and checks that the command lines of several benchmarks share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


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
