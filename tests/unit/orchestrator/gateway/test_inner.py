"""The gateway's port for those inside: what it has, what it says in a drain, and that it lasts to the end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from orchestrator.gateway import inner
from orchestrator.gateway.inner import Inner, inner_page
from outrider.protocol.errors import ConfigError
from outrider.sockets import bound
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving
from tests.unit.orchestrator.gateway.http import Http, rig
from tests.unit.orchestrator.gateway.test_process import gateway

NOWHERE = "127.0.0.1:9"


async def test_open_paths_alone() -> None:
    """Health, version and metrics are there; what costs work is not."""
    async with rig(NOWHERE) as made:
        http = Http(Inner(made.gateway))
        paths = ("/health", "/version", "/metrics", "/v1/models", "/tokenize")
        answers = [await http.get(path) for path in paths]
    assert [one.status for one in answers] == [200, 200, 200, 404, 404]
    assert b"outrider_gateway_requests_running" in b"".join(answers[2].parts)
    assert answers[3].error["message"].endswith("nothing is here; use one of /health, /version, /metrics")


async def test_a_draining_gateway_is_alive_and_not_ready() -> None:
    """So a pod that ends gets no new callers, and Prometheus sees its last requests."""
    async with rig(NOWHERE) as made:
        http = Http(Inner(made.gateway))
        made.gateway.draining = True
        found = [(await http.get(path)).status for path in ("/health", "/version", "/metrics")]
    assert found == [503, 200, 200]


async def test_a_port_in_use() -> None:
    """Is one sentence."""
    taken = bound("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(ConfigError, match=r"metrics_port: cannot listen on 127\.0\.0\.1:\d+ \(Address"):
        async with rig(NOWHERE) as made, inner_page("127.0.0.1", taken.getsockname()[1], made.gateway):
            pass
    taken.close()


async def test_a_port_that_another_process_takes_after_it_was_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is the same sentence: nobody waits for a port that will never answer."""
    taken, ours = socket.socket(), socket.socket()
    for each in (taken, ours):  # Linux lets both bind it until one listens
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(taken.getsockname() if each is ours else ("127.0.0.1", 0))
    taken.listen()
    monkeypatch.setattr(inner, "bound", lambda _host, _port: ours)
    with pytest.raises(ConfigError, match=r"metrics_port: cannot listen on 127\.0\.0\.1:9 \(Address"):
        async with asyncio.timeout(10), rig(NOWHERE) as made, inner_page("127.0.0.1", 9, made.gateway):
            raise AssertionError("it listens")


def test_the_page_outlives_the_listener() -> None:
    """While a drain waits for the last request, the inner port still answers, the HTTP port no longer."""
    with serving(FakeOrchestrator()) as (fake, endpoint), gateway(endpoint, "--metrics-port", "0") as served:
        page = served.ready["metrics"].removesuffix("/metrics")
        assert status(f"{page}/v1/models") == 404
        fake.answers.clear()
        texts: list[str] = []
        asking = threading.Thread(target=lambda: texts.append(served.text()))
        asking.start()
        assert fake.asked.wait(20)
        served.process.send_signal(signal.SIGTERM)
        eventually(lambda: not listening(served.url))
        assert status(f"{page}/version") == status(f"{page}/metrics") == 200
        fake.answers.set()
        asking.join(20)
        assert served.process.wait(20) == 0
    assert texts == ["one two three"]


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what must become true within ten seconds."""
    give_up = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def listening(url: str) -> bool:
    """Whether anybody does at an URL."""
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


def status(url: str) -> int:
    """Of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: int = answer.status
    except urllib.error.HTTPError as error:
        found = error.code
    return found
