"""The processes of the ranks 1, 2, ... on this machine, which end with this one.

Each reads its order from its standard input and ends when the input ends, however this process ends.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from outrider.engine.parallel.order import Order
from outrider.protocol.errors import LostRank

MODULE = "outrider.engine.parallel.follower"
END_SECONDS = 5.0
"""Seconds for a rank to end by itself; then it is killed."""


class Processes:
    """Running ranks. Any thread may call the methods."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._closing = False
        self._running = {order.rank: _start(order) for order in orders}

    def check(self) -> None:
        """Check that all still run.

        Raises:
            LostRank: a rank has ended.
        """
        for rank, process in self._running.items():
            if (status := process.poll()) is not None:
                raise LostRank(_lost(rank, status))

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` with a sentence, on a thread, when a rank ends before `close`."""
        for rank, process in self._running.items():
            threading.Thread(
                target=self._wait, args=(rank, process, on_loss), name=f"rank {rank}", daemon=True
            ).start()

    def close(self) -> None:
        """End all ranks, by force if needed."""
        self._closing = True
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + END_SECONDS
        for process in self._running.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait(self, rank: int, process: subprocess.Popen[bytes], on_loss: Callable[[str], None]) -> None:
        status = process.wait()
        if not self._closing:
            on_loss(_lost(rank, status))


def _start(order: Order) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C reaches only rank 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # only rank 0 reports there that it is ready
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(order.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    return process


def _lost(rank: int, status: int) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"tensor_parallel: rank {rank} {how}; this replica ends, its log says why"
