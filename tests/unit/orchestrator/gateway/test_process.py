"""`outrider serve gateway` as a process: TLS, tokens, drain, and settings that cannot be used."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import pytest

from tests.certificates import self_signed
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving

ROOT = Path(__file__).resolve().parents[4]
COMMAND = (sys.executable, "-m", "outrider", "serve", "gateway", "--port", "0", "--log-format", "json")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
BODY = json.dumps({"prompt": "count"}).encode()


class Served:
    """A running gateway."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, str]) -> None:
        self.process = process
        self.ready = ready
        self.url = ready["endpoint"]

    def post(self, context: ssl.SSLContext | None = None, body: bytes = BODY, **headers: str) -> Any:
        """The answer to a completion."""
        all_headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(self.url + "/v1/completions", body, all_headers)
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return json.load(answer)

    def begin(self, body: bytes) -> http.client.HTTPConnection:
        """A connection on which half of the body of a completion has been sent."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[: len(body) // 2])
        return connection

    def text(self, **options: Any) -> str:
        """The text of a completion."""
        found: str = self.post(**options)["choices"][0]["text"]
        return found


@contextmanager
def gateway(endpoint: str, *flags: str) -> Iterator[Served]:
    """`outrider serve gateway` before an orchestrator."""
    command = [*COMMAND, "--orchestrator", endpoint, *flags]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Served(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()


def test_a_drain_lets_running_requests_end(fake: FakeOrchestrator) -> None:
    """SIGTERM while one runs: it gets its answer, and the process ends with status 0."""
    with gateway(fake.endpoint) as served:
        fake.answers.clear()
        texts: list[str] = []
        asking = threading.Thread(target=lambda: texts.append(served.text()))
        asking.start()
        assert fake.asked.wait(20)
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(0.5)
        fake.answers.set()
        asking.join(20)
        assert served.process.wait(20) == 0
    assert texts == ["one two three"]


def test_a_port_that_another_process_took_meanwhile_is_named(fake: FakeOrchestrator) -> None:
    """Two processes that may reuse a port can bind it until one of them listens on it."""
    with socket.socket() as ours, socket.socket() as other:
        for each in (ours, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(("127.0.0.1", 0))
        other.bind(ours.getsockname())
        other.listen()
        flags = ("--orchestrator", fake.endpoint, "--listen-fd", str(ours.fileno()))
        options: dict[str, Any] = {"cwd": ROOT, "env": ENVIRONMENT, "pass_fds": (ours.fileno(),)}
        ended = subprocess.run([*COMMAND, *flags], **options, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "choose another" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_large_bodies_are_read_during_a_drain(fake: FakeOrchestrator, number: int) -> None:
    """A signal to the whole group: the gateway alone acts on it, and answers what had begun."""
    large = json.dumps({"prompt": "count" * 20_000}).encode()
    command = [*COMMAND, "--orchestrator", fake.endpoint]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            served = Served(process, json.loads(process.stdout.readline()))
            assert served.text(body=large) == "one two three"
            begun = served.begin(large)
            os.killpg(process.pid, number)
            said = list(lines_to("draining", process.stderr))
            begun.send(large[len(large) // 2 :])
            assert begun.getresponse().status == 200
            said += process.communicate(timeout=20)[1].splitlines()
        finally:
            process.kill()
    assert "stopped" in said[-1]
    assert "Traceback" not in "".join(said)


def lines_to(word: str, file: IO[str]) -> Iterator[str]:
    """Lines of a file, to the first with this word."""
    for line in file:
        yield line
        if word in line:
            return


def test_the_grace_period_ends_a_drain(fake: FakeOrchestrator) -> None:
    """What still runs then is cut off, and told so."""
    with gateway(fake.endpoint, "--grace-seconds", "0.5") as served:
        fake.answers.clear()

        def ask() -> None:
            with pytest.raises(urllib.error.HTTPError) as raised:
                served.text()
            refused.append((raised.value.code, json.load(raised.value)["error"]["code"]))

        refused: list[tuple[int, str]] = []
        asking = threading.Thread(target=ask)
        asking.start()
        assert fake.asked.wait(20)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(20) == 0
        fake.answers.set()
        asking.join(20)
    assert refused == [(503, "unavailable")]


def test_tls_and_tokens(fake: FakeOrchestrator, tmp_path: Path) -> None:
    """As on the gRPC edge: PEM files, and a file of bearer tokens; the token goes on to the orchestrator."""
    files = self_signed(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text("s3cret\n")
    flags = ("--tls-cert", files["cert"], "--tls-key", files["key"], "--auth-tokens-file", str(tokens))
    with gateway(fake.endpoint, *flags) as served:
        assert served.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=files["cert"])
        bearer = {"authorization": "Bearer s3cret"}
        assert served.text(context=trusting, **bearer) == "one two three"
        assert fake.metadata[0]["authorization"] == "Bearer s3cret"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            served.text(context=trusting)
        with pytest.raises(urllib.error.URLError):
            served.text(context=ssl.create_default_context(), **bearer)


def test_the_certificate_for_the_orchestrator_is_watched_too(fake: FakeOrchestrator, tmp_path: Path) -> None:
    """The metrics say when the certificate expires that the gateway shows, as an orchestrator's do."""
    files = self_signed(tmp_path)
    flags = ("--tls-client-ca", files["cert"], "--tls-client-cert", files["cert"])
    with (
        gateway(fake.endpoint, *flags, "--tls-client-key", files["key"]) as served,
        urllib.request.urlopen(served.ready["metrics"], timeout=30) as page,
    ):
        text = page.read().decode()
    expiry = re.search(r'expires_timestamp_seconds{files="client_certificate"} (\S+)', text)
    assert expiry
    assert float(expiry[1]) > time.time()


def test_renewed_files_that_cannot_be_used_do_not_end_its_calls(tmp_path: Path) -> None:
    """The gateway goes on with the files that it read at its start, also before its first request."""
    files = self_signed(tmp_path)
    pair = (Path(files["key"]).read_bytes(), Path(files["cert"]).read_bytes())
    with (
        serving(FakeOrchestrator(), credentials=grpc.ssl_server_credentials([pair])) as (_, endpoint),
        gateway(endpoint, "--tls-client-ca", files["cert"]) as served,
    ):
        Path(files["cert"]).write_text("half written")
        assert served.text() == "one two three"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tls-cert", "/no/such/file"), "outrider: tls_key: must be set when tls_cert is"),
        (("--auth-tokens-file", "/no/such/file"), "outrider: auth_tokens_file: "),
        (("--host", "192.0.2.1"), "outrider: host: cannot listen on 192.0.2.1:0"),
        (("--host", "192.0.2.1", "--port", "9"), "outrider: port: cannot listen on 192.0.2.1:9"),
        (("--host", "a..b"), "outrider: host: cannot listen on a..b:0"),
        (("--listen-fd", "99"), "outrider: listen_fd: cannot listen on 99"),
        (
            ("--orchestrator", "nobody"),
            "outrider: orchestrator: 'nobody' is no gRPC endpoint; give host:port",
        ),
        (("--allowed-origins", "x"), "outrider: --allowed-origins: must be an origin such as https://"),
        (("--max-request-mb", "0"), "outrider: --max-request-mb: must be above 0"),
    ],
)
def test_settings_that_cannot_be_used(flags: tuple[str, ...], sentence: str) -> None:
    """One sentence and status 2."""
    done = subprocess.run(
        [*COMMAND, *flags], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(sentence)
