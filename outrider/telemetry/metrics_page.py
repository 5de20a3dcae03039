"""The HTTP server of /metrics: one thread per scrape, with bounds on their number and duration."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from outrider.sockets import cannot_listen, resolve

MAX_SCRAPES = 16
"""Most scrapes at once; further connections are closed unread."""
SCRAPE_SECONDS = 10.0
"""Longest time, in seconds, of a scrape. With a wait for each part, a scraper that sends a byte now and then
would keep its place."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are routine."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        self._ends: dict[socket.socket, float] = {}
        """When each scrape has to have ended."""
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started now
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            self._ends[request] = time.monotonic() + SCRAPE_SECONDS
            super().process_request_thread(request, client_address)
        finally:
            del self._ends[request]
            self._free.release()

    def service_actions(self) -> None:
        """End scrapes that take too long. Called twice per second."""
        for request, end in list(self._ends.items()):
            if time.monotonic() >= end:
                with suppress(OSError):  # it has ended by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a scraper went away, or was too slow."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def serve_metrics(port: int, host: str, registry: CollectorRegistry = REGISTRY) -> int:
    """Serve /metrics from a daemon thread; returns the port (0 picks a free one).

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, *_, address = resolve(host, port, socket.AI_PASSIVE)[0]
        kind = _Server6 if family == socket.AF_INET6 else _Server
        server = make_server(str(address[0]), port, make_wsgi_app(registry), kind, _Handler)
    except OSError as error:
        raise cannot_listen("metrics_port", f"{host}:{port}", error) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
