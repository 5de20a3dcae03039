"""How scripts and benchmarks end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from scripts.console import run

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup

def main():
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(60)
    finally:
        print("cleaned up")

run(main)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_let_a_script_clean_up(name):
    """It has processes in sessions of their own, which a closing terminal does not end."""
    command = [sys.executable, "-c", PROGRAM, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, "cleaned up\n")
