"""The TLS of the gateway's server: what a handshake shows and asks for when the files have been renewed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from orchestrator.gateway.tls import ServerTls
from outrider.config import GatewayConfig
from outrider.rpc.tls import server_certificates
from tests.certificates import authority, certificate


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An authority."""
    return authority(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Another one."""
    return authority(tmp_path / "new")


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """A folder with these files."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def config_of(folder: Path) -> GatewayConfig:
    """A gateway with mutual TLS from the files of a folder."""
    files = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}
    return GatewayConfig(**{setting: str(folder / name) for setting, name in files.items()})


def serving(config: GatewayConfig, certificates: Any = None) -> ssl.SSLContext:
    """The context of a gateway's server."""
    read = server_certificates(config.tls_cert, config.tls_key, config.tls_ca)
    return ServerTls(config, certificates or read).context


def shake_hands(server: ssl.SSLContext, folder: Path, name: str | None = "gateway") -> str:
    """The serial number of the certificate that the server shows to a client with a folder's files.

    Raises:
        ssl.SSLError: one side refuses the other.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(str(folder / "ca.crt"))
    client.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # round trips; TLS 1.2 needs two
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ours.getpeercert()
    assert shown
    return str(shown["serialNumber"])


def both(old: Path, new: Path) -> bytes:
    """A file of both authorities."""
    return (old / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes()


@pytest.mark.parametrize("name", ["gateway", None])
def test_an_authority_is_replaced_while_the_gateway_runs(
    tmp_path: Path, old: Path, new: Path, name: str | None
) -> None:
    """Clients of a new authority are let in when it has been appended, those of the old one until it is
    removed, also clients that name no server."""
    files = write(tmp_path / "gateway", certificate(old, "gateway"))
    server = serving(config_of(files))
    before = write(tmp_path / "before", certificate(old, "caller"))
    after = write(tmp_path / "after", certificate(new, "caller") | {"ca.crt": both(old, new)})
    with pytest.raises(ssl.SSLError):
        shake_hands(server, after, name)
    write(files, {"ca.crt": both(old, new)})
    shake_hands(server, after, name)
    first = shake_hands(server, before, name)
    write(files, certificate(new, "gateway"))
    write(before, {"ca.crt": both(old, new)})
    assert shake_hands(server, after, name) != first
    with pytest.raises(ssl.SSLError):
        shake_hands(server, before, name)


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, old: Path) -> None:
    """A key that does not fit yet leaves the old certificate in use; the next handshake shows the new one."""
    files = write(tmp_path / "gateway", certificate(old, "gateway"))
    caller = write(tmp_path / "caller", certificate(old, "caller"))
    seen = SimpleNamespace(value=object())
    seen.current = lambda: seen.value
    server = serving(config_of(files), seen)
    first, renewed = shake_hands(server, caller), certificate(old, "gateway")
    seen.value = object()
    write(files, {"tls.crt": renewed["tls.crt"]})
    assert shake_hands(server, caller) == first
    write(files, renewed)
    assert shake_hands(server, caller) != first


async def read_from(port: int, client: ssl.SSLContext) -> bytes:
    """What a server of this machine sends until it closes the connection."""
    reader, _ = await asyncio.open_connection("127.0.0.1", port, ssl=client)
    return await reader.read()


async def refusal_of(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """OpenSSL's reason for which a listening server refuses a client."""
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=server) as listening:
        with pytest.raises(ssl.SSLError) as refused:
            await read_from(listening.sockets[0].getsockname()[1], client)
    return refused.value.reason


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_client_learns_why_its_certificate_is_refused(
    tmp_path: Path, old: Path, new: Path, newest: ssl.TLSVersion, loop: Any
) -> None:
    """The connection ends with TLS's alert, whether the certificate is missing or another authority's."""
    server = serving(config_of(write(tmp_path / "gateway", certificate(old, "gateway"))))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.maximum_version = False, newest
    client.load_verify_locations(str(old / "ca.crt"))
    with asyncio.Runner(loop_factory=loop) as runner:
        missing = runner.run(refusal_of(server, client))
        stranger = write(tmp_path / "stranger", certificate(new, "caller"))
        client.load_cert_chain(stranger / "tls.crt", stranger / "tls.key")
        assert "UNKNOWN_CA" in str(runner.run(refusal_of(server, client)))
    expected = "CERTIFICATE_REQUIRED" if newest is ssl.TLSVersion.TLSv1_3 else "HANDSHAKE_FAILURE"
    assert expected in str(missing)
