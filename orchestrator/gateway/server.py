"""uvicorn's server, for a process that handles signals itself and has several listeners."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from orchestrator.gateway.app import ID_OF_MESSAGES
from orchestrator.gateway.connections import Connection
from outrider.request_ids import HEADER
from outrider.sockets import endpoint_of


class Server(uvicorn.Server):
    """uvicorn's server, except that it leaves signals alone and sets `up` when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def server_config(app: Any, max_connections: int, grace_seconds: float, **more: Any) -> uvicorn.Config:
    """The settings that all listeners of the gateway share; `more` are further settings of uvicorn.

    With more open connections or running requests than `max_connections`, the answer is 503.
    """
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        interface="asgi3",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=math.ceil(grace_seconds),  # in whole seconds; 0 does not wait
        **more,
    )


def open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The application, such that pages of these origins may call it from a browser; * means all origins."""
    if not origins:
        return app
    methods, shown = ("GET", "POST"), (HEADER, ID_OF_MESSAGES, "retry-after")
    return CORSMiddleware(app, origins, methods, allow_headers=("*",), expose_headers=shown)


def url_of(listener: socket.socket, scheme: str) -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{endpoint_of(host, port)}"
