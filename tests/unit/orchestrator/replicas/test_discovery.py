"""Endpoints from settings, DNS and a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from orchestrator.replicas import discovery as discovery_module
from orchestrator.replicas.discovery import Address, Discovery, parse_replicas_file
from orchestrator.replicas.fleet import Fleet
from orchestrator.replicas.pool import ReplicaState
from outrider.config import OrchestratorConfig
from outrider.protocol.errors import ConfigError
from outrider.telemetry.instruments import OrchestratorInstruments
from tests.certificates import self_signed
from tests.fakes import FakeVerify


@pytest.mark.parametrize(
    "text",
    [
        *("host", "host:", ":1", "host:0", "host:65536", "host:x", "host:²", "dns:host", "dns::1"),
        *("dns:a..b:1", f"dns:{'a' * 64}:1"),
    ],
)
def test_bad_addresses_name_their_setting(text: str) -> None:
    """An address that does not parse stops the process with the setting's name."""
    with pytest.raises(ConfigError, match=r"^verify: "):
        Address.parse("verify", text)


def test_addresses() -> None:
    """Plain addresses and DNS names are told apart; IPv6 literals keep their brackets."""
    assert Address.parse("draft", "[::1]:80").host == "[::1]"
    assert Address.parse("draft", "dns:name:80") == Address("dns:name:80", "name", 80, True)


def test_file_lines() -> None:
    """The file has one replica per line; comments and empty lines are skipped."""
    parsed = parse_replicas_file("verify a:1\n\n# none\n draft  b:2 # the fast one\nverify c:3\n")
    assert [address.text for address in parsed["verify"]] == ["a:1", "c:3"]
    assert [address.text for address in parsed["draft"]] == ["b:2"]


@pytest.mark.parametrize("line", ["verify", "target a:1", "verify a:1 b:2", "draft a"])
def test_bad_lines_are_named(line: str) -> None:
    """A line that does not parse is shown with its number."""
    with pytest.raises(ConfigError, match="line 2"):
        parse_replicas_file(f"verify a:1\n{line}")


async def test_file_is_read_again(tmp_path: Path) -> None:
    """Changes of the file show at the next look; a broken or missing file keeps what was known."""
    file = tmp_path / "replicas"
    file.write_text("verify a:1\ndraft b:2\n")
    discovery = Discovery.configure("verify", ["s:9"], str(file))
    assert await discovery.endpoints() == ["s:9", "a:1"]
    file.write_text("verify c:3\nverify s:9\n")
    assert await discovery.endpoints() == ["s:9", "c:3"]
    for broken in (b"nonsense", b"verify \xff:1", b"verify dns:a..b:1"):
        file.write_bytes(broken)
        assert await discovery.endpoints() == ["s:9", "c:3"]
    file.unlink()
    assert await discovery.endpoints() == ["s:9", "c:3"]


async def test_a_file_that_stays_unusable_is_warned_of_once(tmp_path: Path) -> None:
    """It is read several times a second; it is warned of again when the reason is another, or comes back."""
    file = tmp_path / "replicas"
    file.write_text("verify a:1\n")
    discovery = Discovery.configure("verify", [], str(file))

    async def warnings() -> int:
        with capture_logs() as lines:
            for _ in range(3):
                assert await discovery.endpoints() == ["a:1"]
        return len(lines)

    file.unlink()
    assert await warnings() == 1
    file.write_text("nonsense")
    assert await warnings() == 1
    file.write_text("verify a:1\n")
    assert await warnings() == 0
    file.write_text("nonsense")
    assert await warnings() == 1


def test_missing_file_stops_the_start(tmp_path: Path) -> None:
    """A replicas_file that is not there is a mistake in the settings."""
    with pytest.raises(ConfigError, match="replicas_file"):
        Discovery.configure("verify", [], str(tmp_path / "none"))


async def test_dns_names_are_polled() -> None:
    """Every address of a name is an endpoint with a certificate for that name; a name that does not resolve
    now keeps its last answer, and is warned of once."""
    discovery = Discovery.configure("draft", ["dns:localhost:80"], "")
    found = await discovery.endpoints()
    assert set(found) <= {"127.0.0.1:80", "[::1]:80"}
    assert found
    assert {discovery.tls_name(endpoint) for endpoint in found} == {"localhost"}
    assert discovery.tls_name("10.0.0.9:80") == ""
    unknown = Discovery.configure("draft", ["dns:name.invalid:80"], "")
    with capture_logs() as lines:
        assert await unknown.endpoints() == []
        unknown._resolved["dns:name.invalid:80"] = ["10.0.0.1:80"]
        assert await unknown.endpoints() == ["10.0.0.1:80"]
    assert [line["name"] for line in lines] == ["name.invalid"]


async def test_names_that_are_no_longer_listed_have_no_certificates(tmp_path: Path) -> None:
    """An address that a removed name had before may have come to a replica of another name."""
    file = tmp_path / "replicas"
    file.write_text("verify dns:old.invalid:80\n")
    discovery = Discovery.configure("verify", [], str(file))
    discovery._resolved = {f"dns:{name}.invalid:80": ["10.0.0.1:80"] for name in ("old", "new")}
    await discovery.endpoints()
    assert discovery.tls_name("10.0.0.1:80") == "old.invalid"
    file.write_text("verify dns:new.invalid:80\n")
    await discovery.endpoints()
    assert discovery.tls_name("10.0.0.1:80") == "new.invalid"


async def test_slow_dns_holds_up_no_other_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and names that are answered count at once; a late answer counts when it has come, and is not
    asked for twice."""
    answer, asked = asyncio.Event(), []

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if host == "slow":
            await answer.wait()
        return [(0, 0, 0, "", ("10.0.0.1" if host == "slow" else "10.0.0.2", port))]

    monkeypatch.setattr(discovery_module, "LOOKUP_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    discovery = Discovery.configure("draft", ["dns:slow:1", "dns:quick:2", "10.0.0.3:3"], "")
    for _ in range(2):
        assert await asyncio.wait_for(discovery.endpoints(), 5) == ["10.0.0.2:2", "10.0.0.3:3"]
    assert asked.count("slow") == 1
    answer.set()
    assert await discovery.endpoints() == ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"]


@pytest.mark.parametrize(
    ("name", "state"), [("DNS:localhost", ReplicaState.USABLE), ("DNS:another", ReplicaState.DOWN)]
)
async def test_a_certificate_is_for_the_name_that_was_resolved(
    tmp_path: Path, name: str, state: ReplicaState
) -> None:
    """A replica found under a DNS name is connected to by address and trusted by that name alone."""
    pair = self_signed(tmp_path, name)
    verify = FakeVerify()
    verify.settings = {"tls_cert": pair["cert"], "tls_key": pair["key"], "tls_ca": pair["cert"]}
    endpoint = await verify.start()
    address = endpoint.replace("127.0.0.1", "dns:localhost")
    client = {"tls_client_cert": pair["cert"], "tls_client_key": pair["key"]}
    config = OrchestratorConfig(verify=(address,), tls_client_ca=pair["cert"], **client)
    fleet = Fleet(config, OrchestratorInstruments(CollectorRegistry()))
    watching = asyncio.create_task(fleet.run())
    unknown = (None, ReplicaState.UNKNOWN)
    while (seen := _state(fleet, endpoint)) in unknown:  # noqa: ASYNC110 - probes run by themselves
        await asyncio.sleep(0.002)
    watching.cancel()
    await asyncio.wait({watching})
    await verify.kill()
    assert seen is state


async def test_a_replica_that_refuses_tls_is_logged_with_what_to_change(tmp_path: Path) -> None:
    """gRPC only says that the handshake failed, or that the socket was closed."""
    pair = self_signed(tmp_path, "DNS:another")
    verify = FakeVerify()
    verify.settings = {"tls_cert": pair["cert"], "tls_key": pair["key"]}
    endpoint = await verify.start()
    hints = [await _hint(endpoint, ca) for ca in (pair["cert"], "")]
    await verify.kill()
    assert hints[0].startswith(f"{endpoint} shows a certificate that is expired, for another name")
    assert hints[1].startswith(f"{endpoint} closed the connection")
    assert "TLS authorities" in hints[1]


async def _hint(endpoint: str, authorities: str) -> str:
    """The hint with which a fleet logs that a verify replica does not answer."""
    fleet = Fleet(
        OrchestratorConfig(verify=(endpoint,), tls_client_ca=authorities),
        OrchestratorInstruments(CollectorRegistry()),
    )
    with capture_logs() as logs:
        watching = asyncio.create_task(fleet.run())
        while not (hints := [str(line["hint"]) for line in logs if "hint" in line]):  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.002)
        watching.cancel()
        await asyncio.wait({watching})
    return hints[0]


async def test_a_replica_that_is_listed_again_comes_back_with_its_channel(tmp_path: Path) -> None:
    """Its sessions count as before, and no memory is lost to a closed channel."""
    listed = tmp_path / "replicas"
    verify = FakeVerify()
    endpoint = await verify.start()
    listed.write_text(f"verify {endpoint}\n")
    config = OrchestratorConfig(replicas_file=str(listed), discovery_seconds=0.01)
    fleet = Fleet(config, OrchestratorInstruments(CollectorRegistry()))
    watching = asyncio.create_task(fleet.run())
    pool = fleet.pools["verify"]
    await _until(lambda: _state(fleet, endpoint) is ReplicaState.USABLE)
    replica, channel = pool.find(endpoint), fleet.channel("verify", endpoint)
    listed.write_text("")
    await _until(lambda: pool.find(endpoint) is None)
    listed.write_text(f"verify {endpoint}\n")
    await _until(lambda: _state(fleet, endpoint) is ReplicaState.USABLE)
    assert (pool.find(endpoint), fleet.channel("verify", endpoint)) == (replica, channel)
    watching.cancel()
    await asyncio.wait({watching})
    await verify.kill()


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - probes and discovery run by themselves
        await asyncio.sleep(0.002)


def _state(fleet: Fleet, endpoint: str) -> ReplicaState | None:
    """What a verify replica can be used for; None before it was discovered."""
    pool = fleet.pools["verify"]
    replica = pool.find(endpoint)
    return None if replica is None else pool.state(replica, 0.0)
