"""Reads the Prometheus page of a service process."""

from __future__ import annotations

from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.cluster import Process

OCCUPANCY = ("_sessions", "_queued_sessions", "_pages_used", "_requests_queued", "_requests_running")
"""Gauges that are zero when nothing runs."""


def samples(process: Process) -> dict[str, float]:
    """Sum of every sample of the page over its labels, by name."""
    address = process.ready["metrics"]
    url = address if address.startswith("http") else f"http://{address}/metrics"
    with urlopen(url, timeout=5) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def gauges(process: Process) -> dict[str, float]:
    """What the process holds now: sessions, queue and pages in use."""
    return {name: value for name, value in samples(process).items() if name.endswith(OCCUPANCY)}
