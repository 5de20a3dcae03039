"""Reads docs/runbook.md: its commands and queries."""

from __future__ import annotations

import re
from pathlib import Path

RUNBOOK = (Path(__file__).resolve().parents[1] / "docs/runbook.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The lines of all blocks in a language."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", RUNBOOK, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in found for line in block.splitlines()]
