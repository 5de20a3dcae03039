"""Reads pages of docs/: commands and queries of the runbook, queries of the metrics page."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
RUNBOOK = (DOCS / "runbook.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = RUNBOOK) -> list[str]:
    """The lines of all blocks in a language."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in found for line in block.splitlines()]
