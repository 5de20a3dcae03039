"""The page's own files, served as they are in the package: no build step, nothing from other sites."""

from __future__ import annotations

from importlib.resources import files

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


class File:
    """Answers with one file."""

    def __init__(self, data: bytes, kind: bytes) -> None:
        self._data = data
        self._kind = kind

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await send_bytes(send, 200, self._data, self._kind + b"; charset=utf-8", HEADERS)


def page_files() -> dict[str, File]:
    """The page's files by the path that each is served at; the page itself is at /."""
    found = {}
    for entry in files(__package__).joinpath("static").iterdir():
        stem, _, suffix = entry.name.rpartition(".")
        path = "/" if stem == "index" else FOLDER + entry.name
        found[path] = File(entry.read_bytes(), KINDS[suffix])
    return found
