"""Links between the pages lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "models").rglob("README.md")])


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    """To a file of the repository, and to a heading of it."""
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s]*)\)", prose(page))
    for path, _, anchor in (link.partition("#") for link in links):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), path
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), f"{path}#{anchor}"
