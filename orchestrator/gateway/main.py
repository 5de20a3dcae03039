"""The gateway process: listens, serves, drains."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Any, cast

from starlette.types import ASGIApp

from orchestrator.gateway.app import Gateway, health_of
from orchestrator.gateway.calls.formats import FORMATS, OutputFormat
from orchestrator.gateway.incoming.bodies import Bodies
from orchestrator.gateway.inner import inner_page
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.gateway.server import Server, open_to, server_config, url_of
from orchestrator.gateway.tls import ServerTls
from orchestrator.request.auth import read_tokens
from outrider.client import AsyncClient, Retries
from outrider.config import GatewayConfig
from outrider.open_files import most_connections
from outrider.output import announce
from outrider.process import pin_cpus, stop_on_signals, unless
from outrider.protocol.errors import ConfigError
from outrider.rpc.channels import open_channel
from outrider.rpc.reloading import Reloaded, watch
from outrider.rpc.tls import client_certificates, server_certificates
from outrider.sockets import bound, cannot_listen, is_endpoint, listen
from outrider.telemetry.logs import get_logger

logger = get_logger(__name__)
RETRIES = Retries(begin=())
"""The gateway does not retry what is refused at its beginning: the answer tells the caller when to retry."""
KEEP_ALIVE_SECONDS = 75
"""Seconds after which a connection without a request is closed."""
BACKLOG = 2048


async def run(config: GatewayConfig) -> None:
    """Serve until a signal ends the process.

    Raises:
        ConfigError: a setting is wrong, or the address cannot be bound.
    """
    pin_cpus(config.cpus)
    if not is_endpoint(config.orchestrator):
        raise ConfigError(f"orchestrator: {config.orchestrator!r} is no gRPC endpoint; give host:port")
    stop = stop_on_signals()
    certificates = server_certificates(config.tls_cert, config.tls_key, config.tls_ca)
    tokens = read_tokens(config.auth_tokens_file) if config.auth_tokens_file else None
    listener = listening(config)
    shown = client_certificates(config.tls_client_ca, config.tls_client_cert, config.tls_client_key)
    bodies, instruments = Bodies(config.max_request_mb << 20), GatewayInstruments()
    watched = [files for files in (certificates, shown, tokens) if files is not None]
    instruments.files.watch(watched)
    async with (
        AsyncClient(config.orchestrator, retries=RETRIES, certificates=shown) as client,
        open_channel(config.orchestrator, certificates=shown) as channel,
    ):
        gateway = Gateway(
            client,
            health_of(channel),
            bodies,
            config.deadline_seconds,
            tokens,
            instruments,
            page=config.page,
            format=OutputFormat(FORMATS[config.tool_call_parser], config.reasoning_parser == "think"),
            figures=config.response_metrics,
        )
        try:
            async with inner_page(config.host, config.metrics_port, gateway) as page:
                context = None if certificates is None else ServerTls(config, certificates).context
                await _serve(config, gateway, listener, context, watched, stop, page)
        finally:
            bodies.close()
    logger.info("stopped")


def listening(config: GatewayConfig) -> socket.socket:
    """A bound socket: the one that another process handed over, or a new one.

    Raises:
        ConfigError: the address cannot be bound, or there is no such socket.
    """
    try:
        if config.listen_fd >= 0:
            return socket.socket(fileno=config.listen_fd)
        return bound(config.host, config.port)
    except OSError as error:
        if config.listen_fd >= 0:
            raise cannot_listen("listen_fd", str(config.listen_fd), error) from error
        setting = "port" if config.port else "host"
        raise cannot_listen(setting, f"{config.host}:{config.port}", error) from error


async def _serve(
    config: GatewayConfig,
    gateway: Gateway,
    listener: socket.socket,
    context: ssl.SSLContext | None,
    watched: Sequence[Reloaded[Any]],
    stop: asyncio.Event,
    page: str,
) -> None:
    server = _server(config, gateway, context)
    _listen(listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(watch(watched))
    try:
        await unless(stop, server.up.wait())
        url = url_of(listener, "http" if context is None else "https")
        logger.info("serving", endpoint=url)
        ready = {"event": "ready", "service": "gateway", "endpoint": url, "metrics": f"{page or url}/metrics"}
        announce(ready)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await _drain(config, gateway, server, serving)
    finally:
        watching.cancel()


def _listen(listener: socket.socket) -> None:
    """Listen on a bound socket: uvloop would close it without an error if that fails.

    Raises:
        ConfigError: another process listens on its port.
    """
    try:
        listen(listener, BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise cannot_listen("port", f"{host}:{port}", error) from error


async def _drain(
    config: GatewayConfig, gateway: Gateway, server: Server, serving: asyncio.Task[None]
) -> None:
    """Refuse new requests, let running ones end, and cut them off after the grace period."""
    gateway.draining = True
    logger.info("draining", running=gateway.running, grace_seconds=config.grace_seconds)
    server.should_exit = True
    await serving


def _server(config: GatewayConfig, gateway: Gateway, context: ssl.SSLContext | None) -> Server:
    tls: dict[str, Any] = {}
    if context is not None:
        tls = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
        tls["ssl_context_factory"] = lambda _config, _default: context
    limits = {"backlog": BACKLOG, "timeout_keep_alive": KEEP_ALIVE_SECONDS}
    app = open_to(config.allowed_origins, cast(ASGIApp, gateway))
    return Server(server_config(app, most_connections(), config.grace_seconds, **limits, **tls))
