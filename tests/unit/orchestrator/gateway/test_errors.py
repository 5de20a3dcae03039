"""The tables of errors and metrics, and the page that shows them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from orchestrator.gateway.errors import KINDS
from orchestrator.gateway.instruments import GatewayInstruments

PAGE = (Path(__file__).resolve().parents[4] / "docs/openai.md").read_text()


def test_the_page_has_every_kind() -> None:
    """Its status with its code."""
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\|", PAGE, re.M)
    assert {(str(kind.status), kind.code or "") for kind in KINDS.values()} == set(rows)


def test_the_page_has_every_metric() -> None:
    """By its full name."""
    rows = re.findall(r"^\| `(outrider_gateway_\w+)` \|", PAGE, re.M)
    described = GatewayInstruments(CollectorRegistry()).described
    assert {metric.name for metric in described} == set(rows)
