"""Standard output whose reader has gone."""

from __future__ import annotations

import os
import subprocess
import sys

ANNOUNCE = """
import sys
from outrider.output import announce
announce({"event": "ready"})
print("more", flush=True)
print("serves on", file=sys.stderr)
"""


def test_a_service_serves_on_without_a_reader_of_its_ready_line() -> None:
    """And ends without an error of Python's; a reader gets the line."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", ANNOUNCE],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "serves on\n")
    read = subprocess.run(
        [sys.executable, "-c", ANNOUNCE], capture_output=True, text=True, timeout=60, check=True
    )
    assert read.stdout == '{"event": "ready"}\nmore\n'
