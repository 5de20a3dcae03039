"""Finds the endpoints of replicas: in a static list, DNS names that are polled, and a file that is reread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from outrider.protocol.errors import ConfigError
from outrider.sockets import endpoint_of
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
KINDS = ("verify", "draft")
LOOKUP_SECONDS = 1.0
"""Longest wait for DNS, which takes half a minute if its servers are gone. A later answer counts when it has
come; other replicas do not wait for it."""


@dataclass(frozen=True, slots=True)
class Address:
    """`host:port`, or `dns:name:port` for every address that the name has."""

    text: str
    host: str
    port: int
    dns: bool

    @classmethod
    def parse(cls, setting: str, text: str) -> Address:
        """Raises ConfigError, naming the setting, when the text is not an address."""
        dns = text.startswith("dns:")
        host, _, port = text.removeprefix("dns:").rpartition(":")
        numbered = port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if not host or "/" in host or not numbered or (dns and not _may_be_name(host)):
            raise ConfigError(f"{setting}: {text!r} is not host:port or dns:name:port")
        return cls(text, host, int(port), dns)


def _may_be_name(host: str) -> bool:
    """Whether a host can be looked up in DNS: no part of its name is empty or too long."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def parse_replicas_file(text: str) -> dict[str, list[Address]]:
    """The addresses of each kind. Empty lines and text after # are ignored.

    Raises:
        ConfigError: a line is not `verify host:port` or `draft host:port`.
    """
    addresses: dict[str, list[Address]] = {kind: [] for kind in KINDS}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in KINDS:
            raise ConfigError(
                f"replicas_file: line {number} is not 'verify host:port' or 'draft host:port': {line!r}"
            )
        addresses[words[0]].append(Address.parse(f"replicas_file, line {number}", words[1]))
    return addresses


@dataclass(slots=True)
class Discovery:
    """Finds the endpoints of one kind of replica."""

    kind: str
    static: tuple[Address, ...]
    file: Path | None
    _resolved: dict[str, list[str]] = field(default_factory=dict)
    """Endpoints in the last answer for each DNS name. A name that does not resolve now keeps its replicas."""
    _unresolved: set[str] = field(default_factory=set)
    """DNS names that did not resolve last time, so that each failure is logged once."""
    _listed: list[Address] = field(default_factory=list)
    _unusable: str = ""
    """Why the file could not be used last time, so that each reason is logged once; empty if it could."""
    _lookups: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Lookups of DNS names that have not been answered yet."""

    @classmethod
    def configure(cls, kind: str, static: Iterable[str], replicas_file: str) -> Discovery:
        """Make a discovery from settings.

        Raises:
            ConfigError: an address does not parse, or the file cannot be read.
        """
        addresses = tuple(Address.parse(kind, text) for text in static)
        discovery = cls(kind, addresses, Path(replicas_file) if replicas_file else None)
        discovery._listed = discovery._read()
        return discovery

    async def endpoints(self) -> list[str]:
        """The endpoints now, without repetition, in the order of the settings."""
        unusable, self._unusable = self._unusable, ""
        try:
            self._listed = self._read()
        except ConfigError as error:
            self._unusable = str(error)
            if self._unusable != unusable:
                logger.warning("replicas file is not usable; keeping what it said before", error=str(error))
        found: dict[str, None] = {}
        addresses = dict.fromkeys((*self.static, *self._listed))
        for endpoints in await asyncio.gather(*map(self._resolve, addresses)):
            found.update(dict.fromkeys(endpoints))
        return list(found)

    def tls_name(self, endpoint: str) -> str:
        """The DNS name that an endpoint was found under, or empty when it was configured as an address.

        The replica's certificate is for this name, not for the address of one pod.
        """
        for address in (*self.static, *self._listed):
            if endpoint in self._resolved.get(address.text, ()):
                return address.host
        return ""

    def _read(self) -> list[Address]:
        if self.file is None:
            return []
        try:
            text = self.file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"replicas_file: cannot read {str(self.file)!r} ({reason})") from error
        return parse_replicas_file(text)[self.kind]

    async def _resolve(self, address: Address) -> list[str]:
        if not address.dns:
            return [address.text]
        lookup = self._lookups.get(address.text)
        if lookup is None:
            lookup = self._lookups[address.text] = asyncio.create_task(self._look_up(address))
        await asyncio.wait({lookup}, timeout=LOOKUP_SECONDS)
        if lookup.done():
            del self._lookups[address.text]
            lookup.result()
        return self._resolved.get(address.text, [])

    async def _look_up(self, address: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if address.text not in self._unresolved:
                logger.warning("DNS name does not resolve", name=address.host, error=str(error))
            self._unresolved.add(address.text)
            return
        self._unresolved.discard(address.text)
        hosts = sorted({str(answer[4][0]) for answer in answers})
        self._resolved[address.text] = [endpoint_of(host, address.port) for host in hosts]
