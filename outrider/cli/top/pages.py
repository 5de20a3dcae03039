"""The services' Prometheus pages: addresses, values, and how those change between two readings."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from outrider.sockets import endpoint_of, is_endpoint, resolve

DNS = "dns:"
SECONDS = 3.0
"""Longest wait for a page, in seconds."""
MAX_BYTES = 16 << 20
AT_ONCE = 16
PATH = "/metrics"
"""Path of a page whose address has none."""

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Reads without the proxies of the environment, which cannot reach pages of this machine."""

Key: TypeAlias = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels of a sample."""


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one page."""

    values: Mapping[Key, float]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples with these labels, and perhaps others; None if there are none."""
        found = self.samples(name, **labels)
        return sum(found.values()) if found else None

    def samples(self, name: str, **labels: str) -> dict[Key, float]:
        """The samples of a metric with these labels, and perhaps others."""
        wanted = set(labels.items())
        return {key: value for key, value in self.values.items() if key[0] == name and wanted <= key[1]}

    def labels(self, name: str, label: str) -> set[str]:
        """The values of a label of a metric."""
        return {value for own, its in self.values if own == name for key, value in its if key == label}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pages as read at one time, by address, and the reasons for those that could not be read."""

    at: float
    pages: Mapping[str, Page]
    problems: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One page at two times, `seconds` apart; `before` is None if it could not be read the first time."""

    before: Page | None
    now: Page
    seconds: float

    def increase(self, name: str, **labels: str) -> float | None:
        """The increase of a counter; None if it is unknown. A restarted process counts from zero."""
        if self.before is None or self.now.total(name, **labels) is None:
            return None
        increase = 0.0
        for sample, now in self.now.samples(name, **labels).items():
            before = self.before.values.get(sample, 0.0)
            increase += now if now < before else now - before
        return increase


def parsed(text: str) -> Page:
    """A page from its text.

    Raises:
        ValueError: the text is no page.
    """
    families = text_string_to_metric_families(text)
    return Page(
        {
            (one.name, frozenset(one.labels.items())): one.value
            for family in families
            for one in family.samples
        }
    )


def addresses(given: Sequence[str]) -> list[str]:
    """Addresses of pages; `dns:name:port` stands for all that the name resolves to now.

    Raises:
        OSError: a name does not resolve, or has no port.
    """
    found: list[str] = []
    for address in given:
        found += _resolved(address[len(DNS) :]) if address.startswith(DNS) else [address]
    return list(dict.fromkeys(found))


def read_snapshot(given: Sequence[str]) -> Snapshot:
    """Read all pages at once."""
    pages: dict[str, Page] = {}
    problems: dict[str, str] = {}
    try:
        known = addresses(given)
    except OSError as error:
        return Snapshot(time.monotonic(), {}, {", ".join(given): f"does not resolve ({error})"})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for address, found in zip(known, pool.map(_read, known), strict=True):
            if isinstance(found, Page):
                pages[address] = found
            else:
                problems[address] = found
    return Snapshot(time.monotonic(), pages, problems)


def changes(before: Snapshot, now: Snapshot) -> dict[str, Change]:
    """The change of each page that could be read now, by address."""
    seconds = now.at - before.at
    return {address: Change(before.pages.get(address), page, seconds) for address, page in now.pages.items()}


def url_of(address: str) -> str:
    """The URL of a page: `host:port` stands for the usual path over plain HTTP."""
    return address if address.startswith(("http://", "https://")) else f"http://{address}{PATH}"


def _resolved(name: str) -> list[str]:
    if not is_endpoint(name):
        raise OSError("it has no port; write dns:name:port")
    host, _, port = name.rpartition(":")
    hosts = sorted({str(entry[4][0]) for entry in resolve(host, int(port))})
    return [endpoint_of(one, port) for one in hosts]


def _read(address: str) -> Page | str:
    """The page, or a sentence about why there is none."""
    try:
        with DIRECTLY.open(url_of(address), timeout=SECONDS) as answer:
            return parsed(answer.read(MAX_BYTES).decode())
    except http.client.InvalidURL as error:
        return f"is no address of a page ({error})"
    except http.client.HTTPException:  # its text may be a frame of gRPC
        return "does not speak HTTP/1, as Prometheus pages do"
    except OSError as error:
        return f"cannot be read ({getattr(error, 'reason', None) or error})"
    except ValueError as error:
        return f"is no Prometheus page ({error})"
