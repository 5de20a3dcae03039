"""The table of errors, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.gateway import app
from orchestrator.gateway.errors import KINDS
from orchestrator.gateway.incoming import bodies

PAGE = (Path(__file__).resolve().parents[4] / "docs/openai.md").read_text()


def test_the_page_has_every_kind() -> None:
    """Its status with its code."""
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\|", PAGE, re.M)
    kinds = [*KINDS.values(), app.NOT_FOUND, app.NOT_ALLOWED, bodies.SLOW, bodies.MEDIA]
    assert {(str(kind.status), kind.code or "") for kind in kinds} == set(rows)
