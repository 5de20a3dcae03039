"""uvicorn's server, in a process that has signals and several listeners of its own."""

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

from orchestrator.gateway.connections import Connection
from outrider.request_ids import HEADER
from outrider.sockets import endpoint_of


class Server(uvicorn.Server):
    """uvicorn's, which leaves the signals to us and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


def server_config(app: Any, max_connections: int, grace_seconds: float, **more: Any) -> uvicorn.Config:
    """What every listener of the gateway has in common; `more` are settings of uvicorn."""
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
        timeout_graceful_shutdown=math.ceil(grace_seconds),  # whole seconds, and 0 waits for nothing
        **more,
    )


def open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The application, which pages of these origins may call from a browser; * stands for all."""
    if not origins:
        return app
    methods = ("GET", "POST")
    return CORSMiddleware(app, origins, methods, allow_headers=("*",), expose_headers=(HEADER,))


def url_of(listener: socket.socket, scheme: str) -> str:
    """Where a bound socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{endpoint_of(host, port)}"
