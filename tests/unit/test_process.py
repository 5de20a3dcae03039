"""The life of a service process: ready line, signals, drain, clean ends of loads that fail or are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import SpanProcessor

from outrider import cores, process
from outrider.config import VerifyConfig
from outrider.process import end_with_parent, in_thread, parse_cpus, pin_cpus, run_event_loop, run_service
from outrider.protocol.errors import ConfigError, InternalError, ModelError, OutriderError
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from outrider.sockets import bound
from outrider.telemetry.spans import use_processor

NAME = "outrider.internal.v1.VerifyService"


class FakeService:
    """Has one session less each time it is asked; notes its end."""

    def __init__(self, failure: OutriderError | None = None) -> None:
        self.failure = failure
        self.sessions = 3
        self.closed = False

    def running(self) -> int:
        """See `Service`."""
        self.sessions = max(0, self.sessions - 1)
        return self.sessions

    async def close(self) -> None:
        """See `Service`."""
        self.closed = True


def _run(build: Callable[[GrpcServer], Awaitable[FakeService]], config: VerifyConfig | None = None) -> None:
    service = run_service("verify", config or VerifyConfig(), [NAME], build)
    run_event_loop(asyncio.wait_for(service, 20))


def test_ready_line_then_drain_on_sigterm(capsys: pytest.CaptureFixture[str]) -> None:
    """A supervisor reads one JSON line; SIGTERM ends the process in order once its sessions have ended."""
    service = FakeService()

    async def build(server: GrpcServer) -> FakeService:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        return service

    _run(build, VerifyConfig(metrics_port=0))
    ready = json.loads(next(line for line in capsys.readouterr().out.splitlines() if line[0] == "{"))
    assert (ready["event"], ready["service"]) == ("ready", "verify")
    assert ready["endpoint"].startswith("127.0.0.1:")
    assert ready["metrics"].endswith("/metrics")
    assert service.closed
    assert service.sessions == 0


def test_the_page_of_an_ipv6_address_has_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """`outrider up` reads the port from it."""
    try:
        bound("::1", 0).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def build(server: GrpcServer) -> FakeService:
        os.kill(os.getpid(), signal.SIGTERM)
        return FakeService()

    _run(build, VerifyConfig(host="::1", metrics_port=0))
    ready = json.loads(next(line for line in capsys.readouterr().out.splitlines() if line[0] == "{"))
    assert (urlsplit(ready["metrics"]).hostname, ready["endpoint"][:6]) == ("::1", "[::1]:")
    assert urlsplit(ready["metrics"]).port


def test_a_service_that_failed_says_so() -> None:
    """Whoever restarts processes that fail must see that this one did not end because it was told to."""
    service = FakeService(InternalError("the engine of this replica has failed"))

    async def build(server: GrpcServer) -> FakeService:
        os.kill(os.getpid(), signal.SIGTERM)
        return service

    with pytest.raises(InternalError, match="has failed"):
        _run(build)
    assert service.closed


class SlowSpans(SpanProcessor):
    """Ends its last export when it is told to."""

    def __init__(self, begun: Callable[[], object]) -> None:
        self.begun = begun
        self.go = threading.Event()
        self.seen: list[bool] = []

    def shutdown(self) -> None:
        """See `SpanProcessor`."""
        self.begun()
        self.seen.append(self.go.wait(20))


def _run_with_spans(make: Callable[[asyncio.AbstractEventLoop], SlowSpans]) -> SlowSpans:
    """Run a service that is told to end at once; returns its spans."""
    made = []

    async def build(server: GrpcServer) -> FakeService:
        made.append(make(asyncio.get_running_loop()))
        use_processor("verify", "verify-0", made[0])
        os.kill(os.getpid(), signal.SIGTERM)
        return FakeService()

    _run(build)
    return made[0]


def test_the_event_loop_runs_during_the_last_export() -> None:
    """A collector that hangs does not keep a second signal from ending the process."""

    def make(loop: asyncio.AbstractEventLoop) -> SlowSpans:
        spans = SlowSpans(lambda: loop.call_soon_threadsafe(spans.go.set))
        return spans  # its export ends when the loop runs

    assert _run_with_spans(make).seen == [True]


def test_the_last_export_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that hangs holds up nobody's end for long."""
    monkeypatch.setattr(process, "SPANS_SECONDS", 0.01)
    spans = _run_with_spans(lambda loop: SlowSpans(lambda: None))
    assert spans.seen == []
    spans.go.set()
    for thread in threading.enumerate():
        if thread.name == process.LOADER:
            thread.join(20)


def test_every_port_is_bound_before_the_load() -> None:
    """Health says NOT_SERVING during the load, and a port that is taken is found before it."""
    seen = []

    async def build(server: GrpcServer) -> FakeService:
        async with open_channel(server.endpoint) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        seen.append(answer.status)
        os.kill(os.getpid(), signal.SIGTERM)
        return FakeService()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting in ("port", "metrics_port", "health_port"):
            with pytest.raises(ConfigError, match=f"{setting}: cannot listen on 127.0.0.1:{port}"):
                _run(build, VerifyConfig(**{setting: port}))
    assert seen == []
    _run(build)
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING]


@pytest.mark.parametrize("service", ["orchestrator.main", "draft_service.main", "verify_service.main"])
def test_torch_is_not_imported_before_the_port_is_bound(service: str) -> None:
    """It takes seconds, so that no service imports it with its main module."""
    check = f"import sys, {service}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=120).returncode == 0


def test_a_load_that_is_stopped_ends_at_once() -> None:
    """SIGTERM during a load of minutes does not wait for it."""
    cancelled = []

    async def build(server: GrpcServer) -> FakeService:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await in_thread(threading.Event().wait)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return FakeService()

    _run(build)
    assert cancelled


STOPPED_LOAD = """
import atexit, os, signal, threading
from outrider.cli.main import main
from verify_service import main as verify

def load():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

verify._build = lambda config, server: verify.in_thread(load)
atexit.register(os.abort)
raise SystemExit(main(["serve", "verify", "--model", "some/model", "--log-format", "json"]))
"""


def test_a_load_that_is_stopped_does_not_abort() -> None:
    """Its thread may be in native code, which aborts at Python's own end; here, what runs at exit does."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_LOAD], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert ended.returncode == 0
    assert json.loads(ended.stderr.splitlines()[-1])["event"] == "stopped"


def test_a_load_that_fails_says_why() -> None:
    """The error of the loader's thread is the error of the process."""

    def load() -> FakeService:
        raise ModelError("no weights in 'x'; give another folder")

    with pytest.raises(ModelError, match="no weights"):
        _run(lambda server: in_thread(load))


async def test_the_event_loop_runs_during_a_load() -> None:
    """A thread loads while health can answer."""
    go = threading.Event()
    asyncio.get_running_loop().call_soon(go.set)
    found = await in_thread(lambda: "loaded" if go.wait(10) else "blocked")
    assert found == "loaded"


@pytest.mark.parametrize("cpus", ["x", "1-", "-1", "5-2", "100000", "0-99999999999999999999"])
def test_wrong_core_lists_are_refused(cpus: str) -> None:
    """A core that is not there is a setting to change, not a process that runs anywhere."""
    with pytest.raises(ConfigError, match="cpus"):
        pin_cpus(cpus)


def test_cores_may_have_any_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores that are on, one may be number 9; a number without a core is refused all the same."""
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (tmp_path / "cpu9").mkdir()
    assert parse_cpus("cpus", "1,9") == [1, 9]
    with pytest.raises(ConfigError, match="cpus: '1,8' is not a list of cores"):
        parse_cpus("cpus", "1,8")


def test_pinning() -> None:
    """A process stays on the cores it was given; an empty list changes nothing."""
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        pin_cpus(f"{core}-{core}")
        assert os.sched_getaffinity(0) == {core}
        pin_cpus("")
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)


def test_a_parent_that_is_killed_begins_a_drain() -> None:
    """The kernel tells of it once for each thread of the parent: sessions go on all the same."""

    class Told(FakeService):
        def running(self) -> int:
            os.kill(os.getpid(), process.PARENT_ENDED)
            return super().running()

    service = Told()

    async def build(server: GrpcServer) -> FakeService:
        os.kill(os.getpid(), process.PARENT_ENDED)
        return service

    _run(build)
    assert service.closed
    assert service.sessions == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of it")
def test_the_kernel_tells_of_a_parent_that_is_killed() -> None:
    """By the signal that may come more than once."""
    program = "import ctypes, os; from outrider import process\n"
    program += "process.end_with_parent(os.getppid()); number = ctypes.c_int()\n"
    program += "ctypes.CDLL(None).prctl(2, ctypes.byref(number)); print(number.value)"  # PR_GET_PDEATHSIG
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert int(ended.stdout) == process.PARENT_ENDED


def test_an_orphan_ends_before_it_begins() -> None:
    """A child whose supervisor is gone already does not start to serve."""
    with pytest.raises(SystemExit):
        end_with_parent(1 if os.getppid() != 1 else 2)
