"""How many files a process may open, and how many of these may be connections to a port."""

from __future__ import annotations

import errno
import os
import resource

from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
MAX_CONNECTIONS = 2048
"""Most open connections to each port, if the system allows four times as many open files."""
FILES = 4 * MAX_CONNECTIONS
"""File descriptors that a process may need."""
MIN_FILES = 64
"""Fewest file descriptors that a service starts with. At rest it has some 25, and gRPC crashes if it gets
none."""


def allow_files() -> None:
    """Let this process open `FILES` files, or as many as the system allows it. Many systems start processes
    with 1024, less than the connections of a port.

    Raises:
        OSError: the system allows fewer than `MIN_FILES`.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    if wanted < MIN_FILES:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if resource.RLIM_INFINITY != now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if wanted < FILES:
        logger.warning(
            "few files may be open, so that ports take few connections; raise `ulimit -Hn`",
            files=wanted,
            connections=most_connections(),
        )


def most_connections() -> int:
    """Most open connections to each port: a quarter of the files that this process may open. A second port,
    connections to replicas, and files need the others."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files // 4))
