"""Reads docs/tracing.md: the attributes of each span."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[1] / "docs/tracing.md").read_text(encoding="utf-8")


def documented() -> dict[str, dict[str, bool]]:
    """Attributes by span, and whether every such span has them: no condition in brackets."""
    found: dict[str, dict[str, bool]] = {}
    attributes: dict[str, bool] = {}
    lists = PAGE.partition("\n## Which requests")[0].replace("\n  ", " ")
    for line in lists.splitlines():
        if line.startswith("### "):
            attributes = found[line.removeprefix("### ").strip("`")] = {}
        elif line.startswith("- "):
            for name, condition in re.findall(r"`([\w.]+)`( \()?", line.partition(": ")[0]):
                attributes[name] = not condition
    return found
