"""The table of errors, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.gateway.errors import KINDS

PAGE = (Path(__file__).resolve().parents[4] / "docs/openai.md").read_text()


def test_the_page_has_every_kind() -> None:
    """Its status with its code."""
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)`)? ?\|", PAGE, re.M)
    assert {(str(kind.status), kind.code or "") for kind in KINDS.values()} == set(rows)
