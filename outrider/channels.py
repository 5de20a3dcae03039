"""Client channels to services, with every option spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from outrider.rpc_errors import error_of
from outrider.tls import channel_credentials

__all__ = ["error_of", "open_channel"]

KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000


def open_channel(
    endpoint: str,
    *,
    max_message_mb: int = 64,
    tls_ca: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    tls_name: str = "",
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to `host:port` that connects at its first call and reconnects by itself.

    gRPC's own retries are off: a session that was cut is continued by who knows its tokens. `tls_name` is
    what the server's certificate must be for, where that is not the endpoint's host.

    Raises:
        ConfigError: a TLS file cannot be read.
    """
    options = _options(max_message_mb)
    credentials = channel_credentials(tls_ca, tls_cert, tls_key)
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=options, interceptors=list(interceptors))
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))
    return grpc.aio.secure_channel(endpoint, credentials, options=options, interceptors=list(interceptors))


def _options(max_message_mb: int) -> list[tuple[str, int | str]]:
    max_bytes = max_message_mb << 20
    return [
        ("grpc.max_send_message_length", max_bytes),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),  # a channel of its own: a bad replica's state is not shared
    ]
