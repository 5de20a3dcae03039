"""A port for those inside: probes and Prometheus. It has no TLS, no tokens and no callers that could fill it,
and it answers until the last request of a drain has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from orchestrator.gateway.app import NOT_FOUND, OPEN, Gateway
from orchestrator.gateway.endpoints import Receive, Scope, Send, send_problem
from orchestrator.gateway.errors import Problem
from orchestrator.gateway.server import Server
from outrider.protocol.errors import ConfigError, Unavailable
from outrider.sockets import bound

MAX_CONNECTIONS = 64


class Inner:
    """The application: `/health`, `/version` and `/metrics` of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            self._check(scope["path"])
            await self._gateway.router(scope, receive, send)
        except Exception as error:  # the last line of defence
            await send_problem(send, error)

    def _check(self, path: str) -> None:
        if path not in OPEN:
            raise Problem(NOT_FOUND, f"{path[:200]}: nothing is here; use one of {', '.join(OPEN)}")
        if path == "/health" and self._gateway.draining:
            raise Unavailable("this gateway is shutting down")


@asynccontextmanager
async def inner_page(host: str, port: int, gateway: Gateway) -> AsyncIterator[str]:
    """Serve it meanwhile; yields its URL, empty where the port is -1.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if port < 0:
        yield ""
        return
    try:
        listener = bound(host, port)
    except OSError as error:
        raise ConfigError(f"metrics_port: cannot listen on {host}:{port} ({error.strerror})") from error
    server = Server(_config(Inner(gateway)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.up.wait()
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        interface="asgi3",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
