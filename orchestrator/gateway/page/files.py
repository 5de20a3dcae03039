"""The page's own files, served as they are in the package: no build step, nothing from other sites."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from importlib.resources import files
from typing import Any

from orchestrator.gateway.sending import Receive, Scope, Send, send_bytes

FOLDER = "/outrider/page/"
KINDS = {"css": b"text/css", "html": b"text/html", "js": b"text/javascript", "svg": b"image/svg+xml"}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""What the page may load and call: only what this gateway serves, and no inline scripts or styles."""
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


Answer = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]


async def _answer(data: bytes, kind: bytes, _scope: Scope, _receive: Receive, send: Send) -> None:
    await send_bytes(send, 200, data, kind + b"; charset=utf-8", HEADERS)


def page_files() -> dict[str, Answer]:
    """What answers with each of the page's files, by path; the page itself is at /."""
    found: dict[str, Answer] = {}
    for entry in files(__package__).joinpath("static").iterdir():
        stem, _, suffix = entry.name.rpartition(".")
        path = "/" if stem == "index" else FOLDER + entry.name
        found[path] = partial(_answer, entry.read_bytes(), KINDS[suffix])
    return found
