"""The frame of every service process: event loop, signals, cores, ready line, drain, exit."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import uvloop

from outrider.config import ServiceConfig
from outrider.cores import core_exists
from outrider.output import announce
from outrider.protocol.errors import ConfigError, OutriderError
from outrider.rpc.serving import GrpcServer
from outrider.sockets import endpoint_of
from outrider.telemetry.logs import get_logger
from outrider.telemetry.metrics_page import serve_metrics
from outrider.telemetry.spans import configure_tracing, shutdown_tracing

logger = get_logger(__name__)
_T = TypeVar("_T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a service in order. A terminal sends SIGHUP when it is closed."""
PARENT_ENDED = signal.SIGUSR1
"""The kernel sends it when the parent is killed, up to once for each of the parent's threads. So a second one
is no request to end at once."""
LOADER = "loader"
"""Name of the threads of `in_thread`."""
SPANS_SECONDS = 5.0
"""Longest wait for the export of the last spans, in seconds."""
PR_SET_PDEATHSIG = 1
"""Number of the `prctl` option, from <linux/prctl.h>."""


class Service(Protocol):
    """The service that a process runs once it has loaded."""

    @property
    def failure(self) -> OutriderError | None:
        """Why the process has to end by itself; None if it need not."""

    def running(self) -> int:
        """Sessions that a drain waits for."""

    async def close(self) -> None:
        """Free everything; called once, after the server has stopped."""


def run_event_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a uvloop event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def run_service(
    service: str,
    config: ServiceConfig,
    service_names: Sequence[str],
    build: Callable[[GrpcServer], Awaitable[Service]],
    interceptors: Sequence[Any] = (),
    while_draining: Sequence[str] = (),
) -> None:
    """Run a service process: listen on every port, load, serve, drain, and return.

    `build` loads what the service needs (blocking parts with `in_thread`, so that health checks are answered
    in the meantime), registers servicers on `server.server` and returns the running service. A signal of
    `stop_signals` starts the drain, or ends a load at once; a second one ends the process. Methods whose
    names are in `while_draining` are served until the end.

    Raises:
        ConfigError: the address or the metrics port cannot be bound, the cores do not exist, or `build`
            raised it.
        OutriderError: the service's own failure, once it has drained.
    """
    pin_cpus(config.cpus)
    stop = stop_on_signals()
    server = GrpcServer(config, service_names, interceptors, while_draining)
    try:
        await server.start()
        metrics = _start_metrics(config)
        configure_tracing(service, server.replica)
        logger.info("listening", endpoint=server.endpoint, metrics=metrics)
        running = await unless(stop, build(server))
        if running is not None:
            await _serve(service, server, running, stop, metrics)
    finally:
        await server.stop()
        await _end_tracing()
    logger.info("stopped")


async def _end_tracing() -> None:
    """Export the last spans. Meanwhile signals are still seen: the collector may hang."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SPANS_SECONDS):
            await in_thread(shutdown_tracing)


def end_during_load() -> None:
    """End the process now if a thread of `in_thread` still runs: a load after a signal, or a last export.

    Python's own end would stop the thread in the middle of native code, which aborts the process.
    """
    if any(thread.name == LOADER for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run a blocking function in a daemon thread, which, unlike a pool's, does not delay the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            set_outcome(outcome)

    def work() -> None:
        set_outcome: Callable[[Any], None] = future.set_result
        try:
            outcome: object = function()
        except Exception as error:  # any error goes to the waiter
            set_outcome, outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, set_outcome, outcome)

    threading.Thread(target=work, name=LOADER, daemon=True).start()
    return await future


def pin_cpus(cpus: str) -> None:
    """Pin this process to a list of cores such as `0`, `0-3` or `0,2`; an empty list changes nothing.

    Raises:
        ConfigError: the list does not parse, names a core that does not exist, or this is not Linux.
    """
    if not cpus:
        return
    if sys.platform != "linux":
        raise ConfigError("cpus: pinning needs Linux; leave it empty")
    cores = parse_cpus("cpus", cpus)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise _no_cores("cpus", cpus) from error


def parse_cpus(name: str, cpus: str) -> list[int]:
    """The cores of a list such as `0`, `0-3` or `0,2`; none if it is empty.

    Raises:
        ConfigError: the list, the setting `name`, does not parse, or names a core that does not exist.
    """
    if not cpus:
        return []
    try:
        cores = [core for part in cpus.split(",") for core in _core_range(part)]
    except ValueError as error:
        raise _no_cores(name, cpus) from error
    return cores


def _no_cores(name: str, cpus: str) -> ConfigError:
    return ConfigError(f"{name}: {cpus!r} is not a list of cores of this machine such as 0 or 0-3")


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel send `PARENT_ENDED` when the parent process dies (on Linux); 0 changes nothing.

    It ends a process that has no handler for it yet.
    """
    if parent_pid == 0 or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, PARENT_ENDED)
    if os.getppid() != parent_pid:  # it died before the kernel was told
        raise SystemExit(1)


def _core_range(part: str) -> range:
    first, dash, last = part.partition("-")
    cores = range(int(first), int(last if dash else first) + 1)
    if not cores or cores[0] < 0 or not core_exists(cores[-1]):
        raise ValueError("there are no such cores")
    return cores


async def _serve(
    service: str, server: GrpcServer, running: Service, stop: asyncio.Event, metrics: str
) -> None:
    try:
        server.set_serving(True)
        logger.info("serving", endpoint=server.endpoint)
        ready = {"event": "ready", "service": service, "endpoint": server.endpoint, "metrics": metrics}
        announce(ready)
        await stop.wait()
        logger.info("draining", running=running.running(), grace_seconds=server.config.grace_seconds)
        await server.drain(running.running)
    finally:
        await running.close()
    if running.failure is not None:
        raise running.failure


def _start_metrics(config: ServiceConfig) -> str:
    if config.metrics_port < 0:
        return ""
    return f"http://{endpoint_of(config.host, serve_metrics(config.metrics_port, config.host))}/metrics"


def stop_signals() -> list[signal.Signals]:
    """The signals that end this process: `STOP_SIGNALS`, without SIGHUP if it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP)]


def stop_on_signals() -> asyncio.Event:
    """An event that `PARENT_ENDED` sets, or the first of `stop_signals`; a further one of these ends the
    process."""
    stop = asyncio.Event()

    def receive(number: int) -> None:
        if stop.is_set():
            sys.stderr.flush()
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, receive, number)
    loop.add_signal_handler(PARENT_ENDED, stop.set)
    return stop


@contextmanager
def helpers_keep_running() -> Iterator[None]:
    """Processes that are started meanwhile do not see `STOP_SIGNALS`.

    Terminals and supervisors send them to all processes of a service, whose helpers it needs while it drains.
    A process inherits the blocked signals. It has to end when its input ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T | None:
    """The result of `work`, or None if `stop` was set first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None
