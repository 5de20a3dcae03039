"""Certificates: tried before they are used, renewed on both sides while calls run."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from outrider.config import VerifyConfig
from outrider.internal.v1 import verify_pb2, verify_pb2_grpc
from outrider.protocol.errors import ConfigError
from outrider.rpc import channels, tls
from outrider.rpc.channels import open_channel
from outrider.rpc.serving import GrpcServer
from outrider.rpc.tls import client_certificates, server_certificates
from outrider.telemetry.instruments import DraftInstruments
from tests.certificates import authority, certificate, issue, mount

HERE = "IP:127.0.0.1"
NAME = "outrider.internal.v1.VerifyService"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two authorities."""
    folder = tmp_path_factory.mktemp("authorities")
    return [authority(folder / name) for name in ("first", "second")]


def server_files(folder: Path) -> dict[str, str]:
    """Settings of a server that demands a certificate."""
    return {"cert": str(folder / "tls.crt"), "key": str(folder / "tls.key"), "ca": str(folder / "ca.crt")}


def test_a_certificate_tells_when_it_expires(tmp_path: Path, authorities: list[Path]) -> None:
    """For the metric that warns before it does; as a server's and as a client's."""
    files = server_files(issue(authorities[0], tmp_path / "tls", HERE, days=3))
    for certificates in (
        server_certificates(**files),
        client_certificates(files["ca"], files["cert"], files["key"]),
    ):
        assert certificates is not None
        assert abs(certificates.value.expires - time.time() - 3 * 86400) < 60
        assert certificates.value.key is not None
        assert b"PRIVATE" not in repr(certificates.value).encode()


def test_the_systems_authorities_need_no_file() -> None:
    """And a client without a certificate has none that expires."""
    certificates = client_certificates("system")
    assert certificates is not None
    assert certificates.value == tls.Certificates()


def unusable(folder: Path, authorities: list[Path], how: str) -> str:
    """Spoil a good folder; returns what the error must say."""
    if how == "expired":
        for file, content in certificate(authorities[0], HERE, days=-1).items():
            (folder / file).write_bytes(content)
        return "tls_cert: would be refused .*expired"
    if how == "another key":
        (folder / "tls.key").write_bytes(certificate(authorities[0], HERE)["tls.key"])
        return "tls_cert, tls_key: cannot be used .*mismatch"
    if how == "cut":
        (folder / "tls.crt").write_bytes((folder / "tls.crt").read_bytes()[:-100])
        return "tls_cert: is no PEM file"
    if how == "garbage inside":
        (folder / "tls.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        return "tls_cert, tls_key: cannot be used"
    if how == "empty":
        (folder / "tls.key").write_bytes(b"")
        return "tls_cert, tls_key: cannot be used"
    (folder / "ca.crt").write_bytes(b"no certificate")
    return "tls_ca: is no PEM file"


@pytest.mark.parametrize("how", ["expired", "another key", "cut", "garbage inside", "empty", "no authority"])
def test_what_nobody_would_accept_is_refused(tmp_path: Path, authorities: list[Path], how: str) -> None:
    """At the start it stops the process with a sentence; later the old certificate stays."""
    folder = issue(authorities[0], tmp_path / "tls", HERE)
    certificates = server_certificates(**server_files(folder))
    assert certificates is not None
    before = certificates.value
    message = unusable(folder, authorities, how)
    assert certificates.current() is before
    with pytest.raises(ConfigError, match=message):
        server_certificates(**server_files(folder))


@pytest.mark.parametrize("usage", ["serverAuth", "clientAuth"])
def test_a_certificate_is_for_its_use(tmp_path: Path, authorities: list[Path], usage: str) -> None:
    """As cert-manager issues them: a server's is no client's, and the other way round."""
    folder = mount(tmp_path / "tls", certificate(authorities[0], HERE, usage=usage))
    files = server_files(folder)

    def serve() -> object:
        return server_certificates(**files)

    def call() -> object:
        return client_certificates(files["ca"], files["cert"], files["key"])

    good, bad = (serve, call) if usage == "serverAuth" else (call, serve)
    assert good()
    with pytest.raises(ConfigError, match=r"would be refused .*purpose"):
        bad()


def test_an_encrypted_key_asks_nobody_for_a_password(tmp_path: Path, authorities: list[Path]) -> None:
    """A service has no terminal to ask at."""
    folder = issue(authorities[0], tmp_path / "tls", HERE)
    key, out = str(folder / "tls.key"), str(folder / "locked.key")
    command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", out]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="the key is encrypted"):
        server_certificates(**{**server_files(folder), "key": out})


class Echo(verify_pb2_grpc.VerifyServiceServicer):
    """A stream that answers each message; notes who called."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """See the proto."""
        self.names.append(context.auth_context()["x509_pem_cert"][0])
        async for _ in requests:
            yield verify_pb2.VerifyResponse()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[GrpcServer, Echo]]:
    """A server with mutual TLS."""
    files = {f"tls_{name}": path for name, path in server_files(folder).items()}
    server, echo = GrpcServer(VerifyConfig(**files), [NAME]), Echo()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(echo, server.server)
    await server.start()
    server.set_serving(True)
    try:
        yield server, echo
    finally:
        await server.stop()


def client(server: GrpcServer, folder: Path) -> grpc.aio.Channel:
    """A channel with the files of a folder."""
    files = server_files(folder)
    certificates = client_certificates(files["ca"], files["cert"], files["key"])
    return open_channel(server.endpoint, certificates=certificates)


async def check(channel: grpc.aio.Channel) -> int:
    """A call that begins now."""
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status)


async def exchange(stream: Any) -> None:
    """One message each way on an open stream."""
    await stream.write(verify_pb2.VerifyRequest())
    assert await stream.read() == verify_pb2.VerifyResponse()


async def test_renewal_goes_through_while_calls_run(
    tmp_path: Path, authorities: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority is replaced in three steps, as its runbook says, with a stream open all the time: trust
    both, issue from the new one, trust the new one only. New calls show new certificates; who still has one
    of the old authority is refused then."""
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.0)
    old, new = authorities
    both = (old / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes()
    server_folder = mount(tmp_path / "server", certificate(old, HERE))
    client_folder = mount(tmp_path / "client", certificate(old, "client"))
    late_folder = mount(tmp_path / "late", certificate(old, "late"))
    mount(late_folder, {**certificate(old, "late"), "ca.crt": both})

    def replace_both(by: Path, ca: bytes) -> None:
        mount(server_folder, {**certificate(by, HERE), "ca.crt": ca})
        mount(client_folder, {**certificate(by, "client"), "ca.crt": ca})

    async with serving(server_folder) as (server, echo), client(server, client_folder) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        first = stub.Verify()
        await exchange(first)
        for by, ca in ((old, both), (new, both), (new, (new / "ca.crt").read_bytes())):
            replace_both(by, ca)
            stream = stub.Verify()
            await exchange(stream)
            await exchange(first)
            assert await check(channel)
            stream.cancel()
        assert len(set(echo.names)) == len(echo.names) == 4
        assert echo.names[-1] == (client_folder / "tls.crt").read_bytes()
        async with client(server, late_folder) as late:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(late)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await check(channel)
        await exchange(first)
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        assert isinstance(channel, channels.RenewedChannel)
        while channel._before:  # noqa: ASYNC110 - the connections of ended calls are closed
            await asyncio.sleep(0.01)


async def test_a_bad_renewal_harms_nobody(
    tmp_path: Path, authorities: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server and client are given an expired certificate: both keep the one they have."""
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.0)
    by = authorities[0]
    server_folder = mount(tmp_path / "server", certificate(by, HERE))
    client_folder = mount(tmp_path / "client", certificate(by, "client"))
    async with serving(server_folder) as (server, _):
        async with client(server, client_folder) as channel:
            assert await check(channel)
            mount(server_folder, certificate(by, HERE, days=-1))
            mount(client_folder, certificate(by, "client", days=-1))
            assert await check(channel)
        mount(client_folder, certificate(by, "client"))
        async with client(server, client_folder) as another:
            assert await check(another)


def test_files_are_reported(tmp_path: Path, authorities: list[Path]) -> None:
    """What was refused is counted, and the metric tells when the certificate in use ends."""
    registry = CollectorRegistry()
    certificates = server_certificates(**server_files(issue(authorities[0], tmp_path / "tls", HERE)))
    assert certificates is not None
    DraftInstruments(registry).files.watch([certificates])

    def sample(name: str, files: str) -> float | None:
        return registry.get_sample_value(f"outrider_draft_{name}", {"files": files})

    expires = "certificate_expires_timestamp_seconds"
    assert sample(expires, "server_certificate") == certificates.value.expires
    assert sample(expires, "client_certificate") == 0
    assert sample("files_refused_total", "server_certificate") == 0
    certificates.on_refused("server_certificate")
    assert sample("files_refused_total", "server_certificate") == 1
