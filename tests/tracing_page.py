"""Reads docs/tracing.md: the attributes of each span."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[1] / "docs/tracing.md").read_text(encoding="utf-8")


def documented() -> dict[str, dict[str, bool]]:
    """Attributes by span, and whether every such span has them: no condition in brackets."""
    found: dict[str, dict[str, bool]] = {}
    attributes: dict[str, bool] = {}
    for line in PAGE.partition("\n## Which requests")[0].splitlines():
        if line.startswith("### "):
            attributes = found[line.removeprefix("### ").strip("`")] = {}
        elif entry := re.match(r"- `([\w.]+)`( \()?", line):
            attributes[entry[1]] = not entry[2]
    return found
