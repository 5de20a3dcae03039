"""Endpoints from settings, DNS and a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.discovery import Address, Discovery, parse_replicas_file
from outrider.errors import ConfigError
from tests.unit.orchestrator.rig import run


@pytest.mark.parametrize(
    "text", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "dns:host", "dns::1"]
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


def test_file_is_read_again(tmp_path: Path) -> None:
    """Changes of the file show at the next look; a broken or missing file keeps what was known."""

    async def scenario() -> None:
        file = tmp_path / "replicas"
        file.write_text("verify a:1\ndraft b:2\n")
        discovery = Discovery.configure("verify", ["s:9"], str(file))
        assert await discovery.endpoints() == ["s:9", "a:1"]
        file.write_text("verify c:3\nverify s:9\n")
        assert await discovery.endpoints() == ["s:9", "c:3"]
        file.write_text("nonsense")
        assert await discovery.endpoints() == ["s:9", "c:3"]
        file.unlink()
        assert await discovery.endpoints() == ["s:9", "c:3"]

    run(scenario)


def test_missing_file_stops_the_start(tmp_path: Path) -> None:
    """A replicas_file that is not there is a mistake in the settings."""
    with pytest.raises(ConfigError, match="replicas_file"):
        Discovery.configure("verify", [], str(tmp_path / "none"))


def test_dns_names_are_polled() -> None:
    """Every address of a name is an endpoint; a name that does not resolve now keeps its last answer."""

    async def scenario() -> None:
        discovery = Discovery.configure("draft", ["dns:localhost:80"], "")
        found = await discovery.endpoints()
        assert set(found) <= {"127.0.0.1:80", "[::1]:80"}
        assert found
        unknown = Discovery.configure("draft", ["dns:name.invalid:80"], "")
        assert await unknown.endpoints() == []
        unknown._resolved["dns:name.invalid:80"] = ["10.0.0.1:80"]
        assert await unknown.endpoints() == ["10.0.0.1:80"]

    run(scenario)
