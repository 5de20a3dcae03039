"""`python -m` for modules that need torch: forked from a process that has loaded torch and `transformers`.

Importing them costs more than everything else that a service does until it is ready, and the tests start
some fifty services. The code under test is imported by each process itself.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.integration.preloaded"])
_lock = threading.Lock()
"""A status can be read once; starting a process reads those of all others."""


class Fork:
    """One process in a session of its own; its standard error goes to a log file."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path = ROOT,
    ) -> None:
        """`folder` is where it works."""
        reader, writer = _context.Pipe(duplex=False)
        given = (module, arguments, environment, log, folder, writer)
        self._process = _context.Process(target=_run, args=given, daemon=True)
        with _lock:
            self._process.start()
        writer.close()
        self.output = os.fdopen(os.dup(reader.fileno()))
        """Its standard output."""
        reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def status(self) -> int | None:
        """The exit status, minus the signal that ended it; None while it runs."""
        with _lock:
            return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """The exit status.

        Raises:
            AssertionError: it did not end in time.
        """
        wait([self._process.sentinel], seconds)
        status = self.status()
        assert status is not None, f"the process runs after {seconds:g} s"
        return status


def _run(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path,
    output: Connection,
) -> None:
    """Be the command."""
    os.setsid()
    os.chdir(folder)
    with log.open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    os.dup2(output.fileno(), 1)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT))
    parent = ("--parent-pid", str(os.getppid())) if arguments[0] == "serve" else ()
    sys.argv = [module, *arguments, *parent]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
