"""Times of messages follow the round trips of the machine at hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from simulator.pair.messages import ECHO, MESSAGE, RESTED_ECHO, REWARM, measure_messages, scaled


def test_messages_take_as_much_longer_as_round_trips() -> None:
    """Both without pauses and after them; a machine that pauses cost nothing has nothing to add."""
    same, slow = scaled(ECHO, RESTED_ECHO), scaled(2 * ECHO, 2 * RESTED_ECHO)
    assert (same.message, same.rewarm) == pytest.approx((MESSAGE, REWARM))
    assert (slow.message, slow.rewarm) == pytest.approx((2 * MESSAGE, 2 * REWARM))
    assert scaled(ECHO, 0.9 * ECHO).rewarm == 0.0


def test_round_trips_are_measured_between_processes() -> None:
    """The echo starts, answers and is gone."""
    found = measure_messages()
    assert found.message > 0.0
    assert found.rewarm >= 0.0


PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-m", "simulator.pair.messages", str(os.getpid())]).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the child")
def test_the_echo_ends_with_its_parent() -> None:
    """A measurement that is killed leaves no process; the pipe closes when the last one is gone."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("127.0.0.1:")
        parent.kill()
        assert parent.communicate(timeout=30)[0] == ""
