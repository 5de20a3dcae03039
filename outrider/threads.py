"""Whether a process may start the threads that a service needs."""

from __future__ import annotations

import errno
import os
import threading

NO_THREAD = "can't start new thread"
"""What Python says, with a plain RuntimeError, when it gets none."""
OWN = 6
"""Threads that a service at rest has beside those of gRPC."""


def check_threads(services: int = 1) -> None:
    """Start as many threads as this many services have at rest, and end them.

    gRPC does not notice that it gets none: it crashes, or waits for ever and does not see signals.

    Raises:
        OSError: this process may not have so many, with the number of a lack of processes.
    """
    grpc = max(4, min(os.cpu_count() or 1, 16))  # it starts one for each core, within these bounds
    ended, started = threading.Event(), []
    try:
        for _ in range(services * (grpc + OWN)):
            thread = threading.Thread(target=ended.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    finally:
        ended.set()
        for thread in started:
            thread.join()
