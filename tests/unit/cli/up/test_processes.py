"""`outrider up` with fake children: order of starting and stopping, restarts, failures, the replicas file."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.up.child import MAX_LINE, SupervisedChild
from outrider.cli.up.plan import ChildSpec
from outrider.cli.up.processes import ServiceProcesses

REPLICAS = [ChildSpec("verify-0", "verify", ()), ChildSpec("draft-0", "draft", ())]
ORCHESTRATOR = ChildSpec("orchestrator", "orchestrator", ("--port", "0"))
GATEWAY = ChildSpec("gateway", "gateway", ("--listen-fd", "7"), sockets=(7,))
URL = "http://127.0.0.1:8000"


class FakeChild:
    """Is ready and ends when the test says so; SIGTERM and SIGKILL end it, unless it `drains`."""

    def __init__(self, spec: ChildSpec, log: list[str]) -> None:
        self.spec = spec
        self.log = log
        self.problem = ""
        self.drains = False
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def become_ready(self, endpoint: str, metrics: str = "") -> None:
        """Print the ready line."""
        self.ready.set_result({"event": "ready", "endpoint": endpoint, "metrics": metrics})

    def end(self, status: int, problem: str = "") -> None:
        """Exit."""
        self.problem = problem
        self._ended.set_result(status)

    async def wait(self) -> int:
        """See `Child`."""
        return await asyncio.shield(self._ended)

    def send(self, number: signal.Signals) -> None:
        """See `Child`."""
        if not self._ended.done():
            self.log.append(f"{number.name} {self.spec.name}")
            if not self.drains:
                self.end(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the fleet work until something holds; the test's own time limit ends it otherwise."""
    while not condition():  # noqa: ASYNC110 - the fleet has no event for it
        await asyncio.sleep(0.01)


class FakeProcess:
    """A process that wrote something and has ended."""

    returncode = 0

    def __init__(self, output: bytes, log: bytes) -> None:
        self.stdout, self.stderr = _stream(output), _stream(log)

    async def wait(self) -> int:
        """See `asyncio.subprocess.Process`."""
        return self.returncode


def _stream(content: bytes) -> asyncio.StreamReader:
    stream = asyncio.StreamReader(limit=MAX_LINE)
    stream.feed_data(content)
    stream.feed_eof()
    return stream


class Listener(socket.socket):
    """Notes its end."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def close(self) -> None:
        """See `socket`."""
        self.log.append("close listener")
        super().close()


class World:
    """A fleet whose children are fakes."""

    def __init__(self, folder: Path, gateway: ChildSpec | None) -> None:
        self.log: list[str] = []
        self.started: asyncio.Queue[FakeChild] = asyncio.Queue()
        self.file = folder / "replicas"
        self.restarts = asyncio.Event()
        """Cleared, crashed children wait for their restart."""
        self.restarts.set()
        self.starts = asyncio.Event()
        """Cleared, the start of a process does not end."""
        self.starts.set()
        self.starting = ""
        """Name of the last child whose start began."""
        self.refusals = 0
        """Number of the next starts that fail."""
        self.listener = Listener(self.log)
        given = (self._start, self._pause, gateway, self.listener if gateway else None)
        self.fleet = ServiceProcesses(REPLICAS, ORCHESTRATOR, self.file, None, 1.0, *given)

    async def _start(self, spec: ChildSpec, _file: str | None, _show: Callable[[str], None]) -> FakeChild:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.starting = spec.name
        await self.starts.wait()
        child = FakeChild(spec, self.log)
        self.log.append(f"start {spec.name}")
        self.started.put_nowait(child)
        return child

    async def _pause(self, _seconds: float) -> None:
        await self.restarts.wait()

    async def up(self) -> list[FakeChild]:
        """Bring everything up; returns verify, draft and orchestrator."""
        children = [await self.started.get() for _ in range(3)]
        for child, port in zip(children, (1001, 1002, 7700), strict=True):
            child.become_ready(f"127.0.0.1:{port}")
        await until(lambda: self.fleet.supervisor.up)
        return children


def _run(
    folder: Path, scenario: Callable[[World], Awaitable[None]], gateway: ChildSpec | None = None
) -> tuple[int, list[str]]:
    """The fleet's exit status and what was started and stopped, in order."""

    async def both() -> tuple[int, list[str]]:
        world = World(folder, gateway)
        fleet = asyncio.create_task(world.fleet.run())
        await scenario(world)
        return await fleet, world.log

    return asyncio.run(asyncio.wait_for(both(), 20))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_all_start_and_the_orchestrator_stops_first(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The ready line comes when everything is ready; the orchestrator's last requests need the replicas."""
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    request.addfinalizer(lambda: signal.signal(number, before))

    async def scenario(world: World) -> None:
        await world.up()
        assert world.file.read_text() == "verify 127.0.0.1:1001\ndraft 127.0.0.1:1002\n"
        os.kill(os.getpid(), number)

    status, log = _run(tmp_path, scenario)
    assert status == 0
    assert log[:3] == ["start verify-0", "start draft-0", "start orchestrator"]
    assert log[3:] == ["SIGTERM orchestrator", "SIGTERM verify-0", "SIGTERM draft-0"]
    ready = json.loads(capsys.readouterr().out)
    assert (ready["event"], ready["service"]) == ("ready", "up")


def test_the_ready_line_names_the_pages_to_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of replicas and orchestrator, where they have any."""

    async def scenario(world: World) -> None:
        for port in range(3):
            (await world.started.get()).become_ready(f"127.0.0.1:{port}", f"http://127.0.0.1:9{port}/metrics")
        await until(lambda: world.fleet.supervisor.up)
        os.kill(os.getpid(), signal.SIGTERM)

    _run(tmp_path, scenario)
    assert json.loads(capsys.readouterr().out)["pages"] == [
        f"http://127.0.0.1:9{i}/metrics" for i in range(3)
    ]


def test_the_orchestrator_is_told_of_all_replicas_at_once(tmp_path: Path) -> None:
    """It would be ready with the first one that can verify, and the first request would have no draft."""

    async def scenario(world: World) -> None:
        verify, draft, _ = [await world.started.get() for _ in range(3)]
        assert world.file.read_text() == ""
        verify.become_ready("127.0.0.1:1001")
        await until(lambda: len(world.fleet.endpoints) == 1)
        assert world.file.read_text() == ""
        draft.become_ready("127.0.0.1:1002")
        await until(lambda: world.file.read_text().count("\n") == 2)
        os.kill(os.getpid(), signal.SIGINT)

    assert _run(tmp_path, scenario)[0] == 0


def test_a_child_that_is_started_again_keeps_its_metrics_page(tmp_path: Path) -> None:
    """A scraper knows the pages of the ready line. The orchestrator keeps its own address as well."""

    async def scenario(world: World) -> None:
        children = [await world.started.get() for _ in range(3)]
        for port, child in enumerate(children, start=1):
            child.become_ready(f"127.0.0.1:100{port}", f"http://127.0.0.1:900{port}/metrics")
        await until(lambda: world.fleet.supervisor.up)
        kept = [[], [], ["--port", "1003"]]
        for port, (first, address) in enumerate(zip(children, kept, strict=True), start=1):
            child = first
            for restart in range(2):
                child.end(-9)
                child = await world.started.get()
                added = child.spec.arguments[len(first.spec.arguments) :]
                assert list(added) == [*address, "--metrics-port", f"900{port}"]
                child.become_ready(f"127.0.0.1:200{restart}", f"http://127.0.0.1:900{port}/metrics")
        os.kill(os.getpid(), signal.SIGINT)

    assert _run(tmp_path, scenario)[0] == 0


def test_a_crashed_replica_comes_back_under_its_new_address(tmp_path: Path) -> None:
    """While it is away the file does not name it; afterwards it names the new port."""

    async def scenario(world: World) -> None:
        _, draft, _ = await world.up()
        draft.end(-9)
        again = await world.started.get()
        assert again.spec.name == "draft-0"
        assert world.file.read_text() == "verify 127.0.0.1:1001\n"
        again.become_ready("127.0.0.1:2002")
        await until(lambda: "draft 127.0.0.1:2002\n" in world.file.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    status, log = _run(tmp_path, scenario)
    assert status == 0
    assert log.count("start draft-0") == 2


def test_a_temporary_folder_that_was_tidied_up_is_made_again(tmp_path: Path) -> None:
    """A replica that crashes after that is found under its new address."""

    async def scenario(world: World) -> None:
        _, draft, _ = await world.up()
        shutil.rmtree(world.file.parent)
        draft.end(-9)
        (await world.started.get()).become_ready("127.0.0.1:2002")
        await until(lambda: world.file.exists() and "draft 127.0.0.1:2002\n" in world.file.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    assert _run(tmp_path / "folder", scenario)[0] == 0


def test_a_full_disk_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The address of a replica that was started again is written once there is room."""

    async def scenario(world: World) -> None:
        _, draft, _ = await world.up()
        world.restarts.clear()
        blocked = world.file.with_suffix(".new")
        blocked.mkdir()
        draft.end(-9)
        await until(lambda: "make room there" in capsys.readouterr().err)
        assert world.file.read_text() == "verify 127.0.0.1:1001\ndraft 127.0.0.1:1002\n"
        blocked.rmdir()
        world.restarts.set()
        (await world.started.get()).become_ready("127.0.0.1:2002")
        await until(lambda: "draft 127.0.0.1:2002\n" in world.file.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    assert _run(tmp_path, scenario)[0] == 0


def test_without_room_for_a_process_a_crashed_replica_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What crashed it may be the want of memory for which it cannot be started; the others go on."""

    async def scenario(world: World) -> None:
        verify, _, _ = await world.up()
        world.refusals = 2
        verify.end(-9)
        (await world.started.get()).become_ready("127.0.0.1:2001")
        await until(lambda: "verify 127.0.0.1:2001\n" in world.file.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    status, log = _run(tmp_path, scenario)
    assert status == 0
    assert log.count("start verify-0") == 2
    assert capsys.readouterr().err.count("cannot be started (Cannot allocate memory); restarting in") == 2


def test_lines_that_cannot_be_shown_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where standard error is a file on a full disk, or a pipe that nobody reads, the services go on."""

    def refuse(_text: str) -> int:
        raise BrokenPipeError

    async def scenario(world: World) -> None:
        monkeypatch.setattr(sys.stderr, "write", refuse)
        verify, _, _ = await world.up()
        verify.end(1)
        await world.started.get()
        os.kill(os.getpid(), signal.SIGTERM)

    status, log = _run(tmp_path, scenario)
    assert status == 0
    assert log.count("start verify-0") == 2


def test_a_restarted_orchestrator_keeps_its_port(tmp_path: Path) -> None:
    """Clients know one address; a port that was picked freely is asked for again."""

    async def scenario(world: World) -> None:
        *_, orchestrator = await world.up()
        orchestrator.end(1)
        again = await world.started.get()
        assert again.spec.arguments[-2:] == ("--port", "7700")
        os.kill(os.getpid(), signal.SIGINT)

    assert _run(tmp_path, scenario)[0] == 0


@pytest.mark.parametrize(("child_status", "status"), [(2, 2), (1, 1), (-11, 1)])
def test_a_child_that_does_not_start_stops_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], child_status: int, status: int
) -> None:
    """Its own sentence is shown, everything else is stopped, and 2 says that what was asked for is wrong."""

    async def scenario(world: World) -> None:
        verify, draft, _ = [await world.started.get() for _ in range(3)]
        verify.become_ready("127.0.0.1:1001")
        draft.end(child_status, "outrider: model: 'x' has no weights")

    found, log = _run(tmp_path, scenario)
    assert found == status
    assert log[-2:] == ["SIGTERM orchestrator", "SIGTERM verify-0"]
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "outrider: draft-0 did not start: model: 'x' has no weights"


def test_a_child_that_a_signal_ended_is_not_explained_by_its_last_log_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the system has no memory for a model, and kills the process that loads it."""

    async def scenario(world: World) -> None:
        verify, *_ = [await world.started.get() for _ in range(3)]
        verify.end(-9, '{"event": "loading the weights of x", "level": "info"}')

    assert _run(tmp_path, scenario)[0] == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("outrider: verify-0 did not start: it was ended by signal 9; perhaps")


def test_a_taken_port_does_not_wait_for_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The orchestrator runs while replicas load; when it cannot listen, they are stopped."""

    async def scenario(world: World) -> None:
        *_, orchestrator = [await world.started.get() for _ in range(3)]
        orchestrator.end(2, "outrider: port: cannot listen on 127.0.0.1:7700")

    status, log = _run(tmp_path, scenario)
    assert status == 2
    assert log[-2:] == ["SIGTERM verify-0", "SIGTERM draft-0"]
    assert "orchestrator did not start: port: cannot listen" in capsys.readouterr().err


async def _up_with_gateway(world: World, endpoint: str = "127.0.0.1:7700") -> tuple[FakeChild, FakeChild]:
    """Bring everything up; returns orchestrator and gateway."""
    verify, draft, orchestrator = [await world.started.get() for _ in range(3)]
    verify.become_ready("127.0.0.1:1001")
    draft.become_ready("127.0.0.1:1002")
    await until(lambda: world.file.read_text().count("\n") == 2)
    orchestrator.become_ready(endpoint)
    gateway = await world.started.get()
    assert not world.fleet.supervisor.up
    gateway.become_ready(URL)
    await until(lambda: world.fleet.supervisor.up)
    return orchestrator, gateway


def test_the_gateway_starts_when_there_is_something_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets the orchestrator's address, the ready line names both, and it stops first. By then nobody else
    has its socket, in which later callers would wait for the end of the drain."""

    async def scenario(world: World) -> None:
        _, gateway = await _up_with_gateway(world)
        assert gateway.spec.arguments[-2:] == ("--orchestrator", "127.0.0.1:7700")
        os.kill(os.getpid(), signal.SIGTERM)

    status, log = _run(tmp_path, scenario, GATEWAY)
    assert status == 0
    assert log[3] == "start gateway"
    assert log[4:7] == ["close listener", "SIGTERM gateway", "SIGTERM orchestrator"]
    ready = json.loads(capsys.readouterr().out)
    assert (ready["endpoint"], ready["http"]) == ("127.0.0.1:7700", URL)


def test_a_gateway_calls_an_orchestrator_of_all_addresses_on_this_machine(tmp_path: Path) -> None:
    """0.0.0.0 can be listened on, not called."""

    async def scenario(world: World) -> None:
        _, gateway = await _up_with_gateway(world, "0.0.0.0:7700")
        assert gateway.spec.arguments[-1] == "127.0.0.1:7700"
        os.kill(os.getpid(), signal.SIGTERM)

    assert _run(tmp_path, scenario, GATEWAY)[0] == 0


def test_a_crashed_gateway_comes_back_alone(tmp_path: Path) -> None:
    """On the same socket, to the same orchestrator; the replicas' file stays as it is."""

    async def scenario(world: World) -> None:
        _, gateway = await _up_with_gateway(world)
        gateway.end(-9)
        again = await world.started.get()
        assert again.spec == gateway.spec
        assert world.file.read_text() == "verify 127.0.0.1:1001\ndraft 127.0.0.1:1002\n"
        os.kill(os.getpid(), signal.SIGTERM)

    assert _run(tmp_path, scenario, GATEWAY)[0] == 0


def test_a_line_that_is_too_long_is_left_out() -> None:
    """Code that comes with a model may write anything; the other lines still count."""
    long, ready = b"." * (2 * MAX_LINE), b'{"event": "ready", "endpoint": "127.0.0.1:1"}'

    async def watched() -> tuple[dict[str, Any], int]:
        process: Any = FakeProcess(long + b"\n" + ready + b"\n", b"first\n" + long + b"\nlast\n")
        child = SupervisedChild(REPLICAS[0], process, shown.append)
        status = await child.wait()
        return child.ready.result(), status

    shown: list[str] = []
    assert asyncio.run(watched()) == (json.loads(ready), 0)
    assert shown == ["first", "last"]


def test_the_end_of_a_child_is_seen_while_a_process_of_its_own_still_runs() -> None:
    """A rank that hangs keeps the streams of its replica open; the replica is started again all the same."""

    async def watched() -> int:
        pipe, script = asyncio.subprocess.PIPE, "sleep 1000 & echo $! >&2; exit 3"
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(60):
                return await SupervisedChild(REPLICAS[0], process, shown.append).wait()
        finally:
            os.kill(int(shown[0]), signal.SIGKILL)
            await process.communicate()  # until its streams are closed

    shown: list[str] = []
    assert asyncio.run(watched()) == 3


def test_a_start_that_has_begun_when_all_are_stopped_does_not_go_on(tmp_path: Path) -> None:
    """Nobody would stop the process: the orchestrator may take the whole grace period."""

    async def scenario(world: World) -> None:
        _, draft, orchestrator = await world.up()
        orchestrator.drains = True
        world.starts.clear()
        draft.end(-9)
        await until(lambda: world.starting == "draft-0")
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: world.log[-1] == "SIGTERM orchestrator")
        world.starts.set()
        await asyncio.sleep(0)
        orchestrator.end(0)

    status, log = _run(tmp_path, scenario)
    assert status == 0
    assert log[-3:] == ["start orchestrator", "SIGTERM orchestrator", "SIGTERM verify-0"]
