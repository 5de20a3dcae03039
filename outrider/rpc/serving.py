"""The gRPC server of every service: options, TLS, health, reflection, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from outrider.config import ServiceConfig
from outrider.open_files import most_connections
from outrider.protocol.errors import ConfigError, Draining, Unavailable
from outrider.rpc.channels import MAX_MESSAGE_BYTES, UNCOMPRESSED
from outrider.rpc.health import NAME as HEALTH
from outrider.rpc.health import HealthServicer
from outrider.rpc.interceptors import ServiceInterceptor
from outrider.rpc.reloading import Reloaded, watch
from outrider.rpc.tls import server_certificates, server_credentials
from outrider.sockets import endpoint_of

MAX_CONCURRENT_STREAMS = 1024
"""Most open calls on one connection; admission has its own, lower limits."""
MAX_METADATA_BYTES = 16 << 10
IDLE_MS = 300_000
"""Time without calls, in milliseconds, after which a connection is closed; the next call connects again."""
HANDSHAKE_MS = 20_000
"""Longest time for TLS and the first frames of HTTP/2; a connection that takes longer is closed."""
MIN_PING_INTERVAL_MS = 10_000
"""Least time between pings of a client that sends nothing else; a client that pings more often is cut off.
Our own clients wait twice as long (`channels.KEEPALIVE_MS`); gRPC's default is five minutes."""
MAX_OPTION = 2**31 - 1
"""gRPC's largest option: messages of 2 GiB, which protobuf cannot exceed, and connections of 24 days."""
DRAIN_POLL_SECONDS = 0.02
QUIET_POLLS = 4
"""Number of polls in a row that must find nothing running before a drained server stops: a call that was let
in may not have been read yet."""
STOP_GRACE_SECONDS = 0.25
"""Seconds for final statuses to be sent after the last session ended; health watches end only with this."""


class GrpcServer:
    """A server that reports its true health from its start.

    Lifecycle: `start` (loading: calls are refused with `Unavailable`), register servicers on `server`,
    `set_serving(True)`, `drain`. Health names: "" (overall), each service, "readiness", and "liveness",
    which is SERVING as soon as the server is up. With `health_port`, a second server reports the same health
    there in plaintext, and nothing else, because a kubelet's probes cannot use TLS.
    """

    def __init__(
        self,
        config: ServiceConfig,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        while_draining: Sequence[str] = (),
    ) -> None:
        """Methods whose names are in `while_draining` are also served during a drain, which they help to
        end."""
        self.config = config
        self.service_names = tuple(service_names)
        self.port = 0
        self.health_port = 0
        self._interceptor = ServiceInterceptor(
            service_names, Unavailable("this replica is still loading"), while_draining
        )
        self.certificates = server_certificates(config.tls_cert, config.tls_key, config.tls_ca)
        self.watched: list[Reloaded[Any]] = [self.certificates] if self.certificates else []
        """Values from files that may change, which are checked regularly. A service adds its own."""
        self._ready = True
        self._watching: asyncio.Task[None] | None = None
        self.server = grpc.aio.server(
            interceptors=[self._interceptor, *interceptors], options=_options(config)
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._servers = [self.server]
        if config.health_port >= 0:
            interceptor = ServiceInterceptor((), None)
            self._servers.append(grpc.aio.server(interceptors=[interceptor], options=_options(config)))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._servers[-1])
        if config.reflection:
            names = (*service_names, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.server)

    @property
    def endpoint(self) -> str:
        """`host:port` that the server is bound to."""
        return endpoint_of(self.config.host, self.port)

    @property
    def replica(self) -> str:
        """The configured name of this replica, or its endpoint."""
        return self.config.name or self.endpoint

    async def start(self) -> int:
        """Bind and answer health; returns the port.

        Raises:
            ConfigError: an address cannot be bound.
        """
        credentials = server_credentials(self.certificates) if self.certificates else None
        self.port = self._bind("port", self.server, self.config.port, credentials)
        for probes in self._servers[1:]:
            self.health_port = self._bind("health_port", probes, self.config.health_port, None)
        self._set_health(False)
        self._health.set(["liveness"], serving=True)
        for server in self._servers:
            await server.start()
        self._watching = asyncio.create_task(watch(self.watched))
        return self.port

    def set_serving(self, serving: bool) -> None:
        """Let calls in or refuse them, and report this in health; a drain that has begun is not undone."""
        if isinstance(self._interceptor.refusal, Draining):
            return
        self._interceptor.refusal = None if serving else Unavailable("this replica is not serving")
        self._set_health(serving and self._ready)

    def set_ready(self, ready: bool) -> None:
        """Report in health, from `set_serving` on, whether new calls should be sent here; those that come
        anyway are served."""
        self._ready = ready
        if self._interceptor.refusal is None:
            self._set_health(ready)

    async def drain(self, running: Callable[[], int]) -> None:
        """Take no new calls, wait until `running()` stays 0 or the grace period has passed, and stop."""
        self._interceptor.refusal = Draining("this replica is shutting down; try another")
        self._set_health(False)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.grace_seconds):
                await _quiet(running)
        await self.stop()

    async def stop(self) -> None:
        """Stop at once; calls that still run are cancelled."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(server.stop(STOP_GRACE_SECONDS) for server in self._servers))

    def _bind(
        self, setting: str, server: grpc.aio.Server, port: int, credentials: grpc.ServerCredentials | None
    ) -> int:
        """Bind the server to an address; returns its port."""
        address = endpoint_of(self.config.host, port)
        bound = 0
        with suppress(RuntimeError):
            if credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials)
        if bound == 0:
            raise ConfigError(
                f"{setting if port else 'host'}: cannot listen on {address}; it is in use or not an address "
                "of this machine; choose another"
            )
        return bound

    def _set_health(self, serving: bool) -> None:
        self._health.set(["", "readiness", *self.service_names], serving)


def _options(config: ServiceConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a taken port is an error, not a second listener
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", min(config.max_request_mb << 20, MAX_OPTION)),
        UNCOMPRESSED,
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),  # equal: a gap would refuse at random
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        *_connection_age(config.max_connection_seconds),
    ]


def _connection_age(seconds: float) -> list[tuple[str, int]]:
    """The option that ends connections at about this age; no option if it is 0."""
    return [("grpc.max_connection_age_ms", min(int(seconds * 1000), MAX_OPTION))] if seconds else []


async def _quiet(running: Callable[[], int]) -> None:
    """Wait until nothing runs, including calls that were let in just before calls were refused."""
    quiet = 0
    while quiet < QUIET_POLLS:
        await asyncio.sleep(DRAIN_POLL_SECONDS)
        quiet = 0 if running() else quiet + 1
