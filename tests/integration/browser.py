"""A headless Chromium of this machine, driven by Playwright: for tests of the page, and for its pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # it does not run as root otherwise, and opens pages of this machine alone
    *("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def chromium() -> str | None:
    """Where Chromium is; None where it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    path = chromium()
    if path is None:
        raise FileNotFoundError("install the Debian package chromium, or another Chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()
