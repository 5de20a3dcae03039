"""A second port, for probes and Prometheus. It has no TLS and no tokens, and public callers, who do not reach
it, cannot use up its connections. It answers until the last request of a drain has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.gateway.app import NOT_FOUND, OPEN, Gateway
from orchestrator.gateway.errors import Problem
from orchestrator.gateway.sending import Receive, Scope, Send, problem_from, send_problem
from orchestrator.gateway.server import Server, server_config, url_of
from outrider.protocol.errors import Unavailable
from outrider.sockets import bound, cannot_listen, listen

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
            await send_problem(send, problem_from(error))

    def _check(self, path: str) -> None:
        if path not in OPEN:
            raise Problem(NOT_FOUND, f"{path[:200]}: nothing is here; use one of {', '.join(OPEN)}")
        if path == "/health" and self._gateway.draining:
            raise Unavailable("this gateway is shutting down")


@asynccontextmanager
async def inner_page(host: str, port: int, gateway: Gateway) -> AsyncIterator[str]:
    """Serve the port inside the `with` block; yield its URL, which is empty when the port is -1.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if port < 0:
        yield ""
        return
    try:
        listener = bound(host, port)
        listen(listener)  # here, because the server would wait for ever if that failed
    except OSError as error:
        raise cannot_listen("metrics_port", f"{host}:{port}", error) from error
    server = Server(server_config(Inner(gateway), MAX_CONNECTIONS, grace_seconds=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.up.wait()
        yield url_of(listener, "http")
    finally:
        server.should_exit = True
        await serving
