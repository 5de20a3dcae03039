"""Metrics of files that are renewed while a service runs: certificates and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from outrider.rpc.reloading import Reloaded
from outrider.telemetry.metric_parts import Maker, start_at_zero

CERTIFICATES = ("server_certificate", "client_certificate")


class FileInstruments:
    """Metrics of files that are renewed while a service runs: certificates and tokens."""

    def __init__(self, make: Maker) -> None:
        self._refused = make.counter("files_refused", "New files that could not be used.", "files")
        self._expires = make.gauge(
            "certificate_expires_timestamp_seconds",
            "When the certificate expires, in Unix time, or 0.",
            "files",
        )
        start_at_zero(self._refused, CERTIFICATES)
        for name in CERTIFICATES:
            self._expires.labels(name)

    def watch(self, watched: Iterable[Reloaded[Any]]) -> None:
        """Report on these files from now on."""
        for files in watched:
            self._refused.labels(files.name)
            files.on_refused = self.refused
            if files.name in CERTIFICATES:
                self._expires.labels(files.name).set_function(partial(_expiry, files))

    def refused(self, name: str) -> None:
        """Count new files of this name that could not be used."""
        self._refused.labels(name).inc()


def _expiry(files: Reloaded[Any]) -> float:
    return float(files.value.expires)
