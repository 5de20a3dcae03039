"""Takes the pictures of the gateway's page: `python -m scripts.draw_page`.

Starts the demo pair and a Chromium; with `--url`, the page of a gateway that runs already.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from playwright.sync_api import Browser, Page, expect

from scripts.browser import browser
from scripts.child import ROOT

IMAGES = ROOT / "docs/images"
PROMPT = """import argparse


def main():
    parser = argparse.ArgumentParser("""
MILLISECONDS = 120_000
STEPS = 25
"""Of which one is shown."""
UP = (
    "up",
    "--target",
    "models/demo/target",
    "--draft",
    "models/demo/draft",
    "--port",
    "0",
    "--http-port",
    "0",
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One way to look at the page."""

    name: str
    width: int
    scheme: Literal["light", "dark"]
    temperature: str


PICTURES = (
    Picture("page-light", 1180, "light", "0"),
    Picture("page-dark", 1180, "dark", "0.6"),
    Picture("page-narrow", 400, "light", "0"),
)


@contextmanager
def served(url: str) -> Iterator[str]:
    """The address of a page: the one given, or that of services started for it."""
    if url:
        yield url
        return
    command = [sys.executable, "-m", "outrider", *UP]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["http"]
        finally:
            process.terminate()


def take(opened: Browser, url: str, picture: Picture) -> None:
    """Run the request, look at a step, and write the picture."""
    context = opened.new_context(
        viewport={"width": picture.width, "height": 800}, color_scheme=picture.scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url)
    page.get_by_label("Text to continue").fill(PROMPT)
    page.get_by_label("Temperature").fill(picture.temperature)
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("Finished", timeout=MILLISECONDS)
    look_at_a_tree(page)
    page.screenshot(path=IMAGES / f"{picture.name}.png", full_page=True)
    context.close()


def look_at_a_tree(page: Page) -> None:
    """The one of the last steps with most candidates that were not chosen."""
    slider = page.get_by_role("slider")
    slider.focus()
    wasted = {}
    for _ in range(STEPS):
        slider.press("ArrowLeft")
        page.wait_for_timeout(50)
        found = re.search(r"Step (\d+) of \d+: (\d+) of (\d+)", page.inner_text("#step-summary"))
        if found:
            wasted[int(found[1])] = int(found[3]) - int(found[2])
    best = max(wasted, key=wasted.__getitem__)
    for _ in range(best - min(wasted)):
        slider.press("ArrowRight")
    slider.blur()
    page.wait_for_timeout(100)


def main() -> None:
    """All pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="", help="a page that is served already")
    with served(parser.parse_args().url) as url, browser() as opened:
        for picture in PICTURES:
            take(opened, url, picture)
            print(IMAGES / f"{picture.name}.png")


if __name__ == "__main__":
    main()
