"""`outrider top`: frames from recorded pages, and addresses, pages and screens of the command."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from outrider.cli.main import main
from outrider.cli.top import command
from outrider.cli.top.command import top
from outrider.cli.top.frame import Frame, frame_of, quantile
from outrider.cli.top.pages import Change, Page, Snapshot, addresses, parsed, read_snapshot, url_of
from outrider.cli.top.view import view
from outrider.protocol.errors import Unavailable

RECORDED = Path(__file__).parent / "recorded"
KINDS = ("orchestrator", "verify", "draft")
SECONDS = 4.0


def recorded(when: str, *kinds: str, at: float = 0.0) -> Snapshot:
    """Pages of services of the demo pair, before and after two requests."""
    pages = {f"{kind}:9464": parsed((RECORDED / f"{kind}-{when}.txt").read_text()) for kind in kinds}
    return Snapshot(at, pages, {})


def frame(*kinds: str) -> Frame:
    """What happened in between."""
    return frame_of(recorded("before", *kinds), recorded("after", *kinds, at=SECONDS))


def drawn(shown: Frame) -> str:
    """As plain text."""
    console = Console(width=120, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(view(shown))
    return captured.get()


def test_a_series_that_ends_is_no_restart() -> None:
    """Each sample counts by itself: one that is gone adds nothing, one that fell began at zero."""
    name = "steps_total"
    pages = [
        Page({(name, frozenset({("task", task)})): float(value) for task, value in values.items()})
        for values in ({"a": 1000, "b": 50, "c": 7}, {"b": 80, "c": 3, "d": 5})
    ]
    assert Change(*pages, seconds=1.0).increase(name) == 30 + 3 + 5
    assert Change(*pages, seconds=1.0).increase(name, task="c") == 3
    assert Change(*pages, seconds=1.0).increase(name, task="a") is None


def test_a_frame_tells_what_happened_between_two_snapshots() -> None:
    """The figures are those of the two requests: 100 tokens of code and 60 without a label."""
    found = frame(*KINDS)
    requests = found.requests
    assert requests is not None
    assert (requests.running, requests.waiting) == (0.0, 0.0)
    assert requests.finished == 2 / SECONDS
    code, unlabelled = found.tasks
    assert (code.name, unlabelled.name) == ("code", "none")
    assert code.tokens * SECONDS == pytest.approx(100, abs=1), "the last step of a text may be cut"
    assert unlabelled.tokens * SECONDS == pytest.approx(60, abs=1)
    assert requests.tokens == pytest.approx(code.tokens + unlabelled.tokens)
    assert 1.0 <= unlabelled.per_step < code.per_step
    assert found.efficiency is not None
    assert 0.5 < found.efficiency <= 1.0
    assert found.states == {"verify": {"usable": 1.0}, "draft": {"usable": 1.0}}
    verify, draft = found.replicas
    assert (verify.kind, verify.limit, verify.pages) == ("verify", 64.0, 4096.0)
    assert verify.tokens == 160 / SECONDS
    assert verify.efficiency == found.efficiency
    assert (draft.kind, draft.efficiency) == ("draft", None)
    assert draft.step is not None
    assert found.problems == {}


def test_each_page_alone_tells_what_it_knows() -> None:
    """Without an orchestrator's there are no requests, without replicas' no rows of them."""
    only = frame("orchestrator")
    assert only.requests is not None
    assert (only.replicas, only.efficiency) == ((), None)
    assert frame("verify").requests is None
    assert [replica.kind for replica in frame("draft").replicas] == ["draft"]


def test_several_pages_add_up() -> None:
    """Two orchestrators have twice the tokens; both see the same replicas."""
    one = frame("orchestrator")
    pages = [recorded(when, "orchestrator").pages["orchestrator:9464"] for when in ("before", "after")]
    before, after = ({"a": page, "b": page} for page in pages)
    two = frame_of(Snapshot(0.0, before, {}), Snapshot(SECONDS, after, {}))
    assert one.requests is not None
    assert two.requests is not None
    assert two.requests.tokens == 2 * (one.requests.tokens or 0.0)
    assert two.states == one.states


def test_a_process_that_was_started_again_begins_at_zero() -> None:
    """What it did since counts, and nothing is negative."""
    backwards = frame_of(recorded("after", *KINDS), recorded("before", *KINDS, at=SECONDS))
    assert backwards.requests is not None
    assert backwards.requests.tokens is not None
    assert backwards.requests.tokens > 0
    assert all(task.tokens > 0 for task in backwards.tasks)


def test_a_page_that_is_new_has_no_rates_yet() -> None:
    """Its gauges are shown."""
    found = frame_of(Snapshot(0.0, {}, {}), recorded("after", *KINDS, at=SECONDS))
    assert found.requests is not None
    assert found.requests.tokens is None
    assert found.replicas[0].pages == 4096.0
    assert re.search("tokens/s +\N{EN DASH}", drawn(found))


def test_other_pages_are_named() -> None:
    """A page that is none of ours, and one that cannot be read."""
    other = Snapshot(1.0, {"a:1": Page({("up", frozenset()): 1.0})}, {"b:1": "cannot be read (timed out)"})
    said = drawn(frame_of(other, other))
    assert "a:1 is no page of an orchestrator, a verify or a draft service" in said
    assert "b:1 cannot be read (timed out)" in said


def test_a_frame_is_drawn_with_all_of_its_parts() -> None:
    """Plain text without signs for colours."""
    said = drawn(frame(*KINDS))
    for part in (
        "0 running, 0 waiting",
        "code",
        "(no label)",
        "verify verify:9464",
        "draft draft:9464",
        "1 usable",
    ):
        assert part in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, [], None),
        (0.5, [(1.0, 0.0), (float("inf"), 0.0)], None),
        (0.5, [(1.0, 2.0), (2.0, 4.0), (float("inf"), 4.0)], 1.0),
        (0.75, [(1.0, 2.0), (2.0, 4.0), (float("inf"), 4.0)], 1.5),
        (0.95, [(1.0, 2.0), (2.0, 2.0), (float("inf"), 4.0)], 2.0),
    ],
)
def test_quantiles_lie_within_their_bucket(
    share: float, buckets: list[tuple[float, float]], expected: float | None
) -> None:
    """As Prometheus reckons them."""
    assert quantile(share, buckets) == expected


def test_addresses() -> None:
    """A host and port, a URL, and all that a name resolves to."""
    assert url_of("a:1") == "http://a:1/metrics"
    assert url_of("https://a:1/x") == "https://a:1/x"
    assert "127.0.0.1:9464" in addresses(["dns:localhost:9464", "127.0.0.1:9464"])
    assert addresses(["a:1", "a:1"]) == ["a:1"]


class Handler(BaseHTTPRequestHandler):
    """Serves a recorded page, or something else."""

    def do_GET(self) -> None:
        """See the standard library."""
        steps = 'outrider_orchestrator_steps_total{task="[/x] :a:"} ' + str(time.monotonic_ns())
        known = {
            "/metrics": (RECORDED / "verify-after.txt").read_bytes(),
            "/other": b"<html>",
            "/gateway": b"http_requests_total 1\n",
            "/tasks": f"outrider_orchestrator_requests_running 1\n{steps}\n".encode(),
        }
        self.send_response(200 if self.path in known else 404)
        self.end_headers()
        self.wfile.write(known.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def served() -> Iterator[str]:
    """The address of a server of pages."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def _free() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_pages_are_read_and_problems_are_sentences() -> None:
    """One that answers, one that is no page, one that is not there, and a server that is not there."""
    nobody = _free()
    with served() as address:
        found = read_snapshot([address, f"http://{address}/other", f"http://{address}/missing", nobody])
    assert found.pages[address].total("outrider_verify_tokens_total") == 400.0
    assert found.problems[f"http://{address}/other"].startswith("is no Prometheus page")
    assert (
        "404" in found.problems[f"http://{address}/missing"]
        or "Not Found" in found.problems[f"http://{address}/missing"]
    )
    assert "refused" in found.problems[nobody]


def test_an_address_that_is_none_is_said_to_be_none() -> None:
    """Nobody was asked, so nothing is said about how they answer."""
    assert (
        read_snapshot(["host:http"]).problems["host:http"].startswith("is no address of a page (nonnumeric")
    )


def test_pages_are_read_without_the_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy does not reach the pages of this machine."""
    monkeypatch.setenv("http_proxy", f"http://{_free()}")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("urllib.request._opener", None)  # urlopen keeps the proxies of its first call
    with served() as address:
        assert not read_snapshot([address]).problems


def test_a_grpc_port_is_named_without_what_it_sends() -> None:
    """A frame of HTTP/2, which no terminal should see."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as caller:
                caller.sendall(bytes([0, 0, 18, 4, 0, 0, 0, 0, 0, 0, 3, 127, 255, 10]))
                caller.recv(4096)

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert read_snapshot([address]).problems == {
            address: "does not speak HTTP/1, as Prometheus pages do",
        }


def _arguments(*pages: str) -> argparse.Namespace:
    return argparse.Namespace(metrics=list(pages), interval=0.01, once=True)


def test_one_frame_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts; a page that is missing does not hide the others."""
    nobody = _free()
    with served() as address:
        assert top(_arguments(address, nobody)) == 0
    said = capsys.readouterr().out
    assert f"verify {address}" in said
    assert f"{nobody} cannot be read" in said
    assert "\x1b" not in said


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A task label that looks like rich's markup is only text."""
    with served() as address:
        assert top(_arguments(f"http://{address}/tasks")) == 0
    assert "[/x] :a:" in capsys.readouterr().out


def test_the_pages_of_several_flags_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of one."""
    with served() as address:
        flags = ["--metrics", f"http://{address}/metrics", "--metrics", f"http://{address}/tasks"]
        assert main(["top", "--once", "--interval", "0.01", *flags]) == 0
    said = capsys.readouterr().out
    assert f"verify {address}" in said
    assert "[/x] :a:" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_screen_back(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without its cursor and its lines would be left."""
    screen, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    console = Console(file=screen, force_terminal=True, width=120, height=30)
    monkeypatch.setattr(command, "_console", lambda: console)
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=lambda _: os.kill(os.getpid(), number)))
    with served() as address:
        assert top(argparse.Namespace(metrics=[address], interval=0.01, once=False)) == 0
    assert screen.getvalue().endswith("\x1b[?1049l")
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_frame_without_any_service_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The page of something else, such as the gateway's, is named, and the status tells scripts."""
    with served() as address:
        assert top(_arguments(f"http://{address}/gateway")) == 1
    assert "/gateway is no page of an orchestrator" in capsys.readouterr().out


def test_without_any_page_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and the status of a failure; a name that does not resolve, or has no port, is one too."""
    with pytest.raises(Unavailable, match="--metrics-port"):
        top(_arguments(_free()))
    with pytest.raises(Unavailable, match="does not resolve"):
        top(_arguments("dns:nowhere.invalid:1"))
    with pytest.raises(Unavailable, match="does not resolve"):
        top(_arguments("dns:a..b:1"))
    for name in ("dns:verify", "dns:verify:http", "dns:verify:99999"):
        with pytest.raises(
            Unavailable, match=f"^{name} does not resolve .it has no port; write dns:name:port"
        ):
            top(_arguments(name))
    assert main(["top", "--once", "--metrics", _free()]) == 1
    assert capsys.readouterr().err.startswith("outrider: 127.0.0.1:")
