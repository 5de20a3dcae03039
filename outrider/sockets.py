"""Addresses, and sockets that are bound before the process that listens on them is started."""

from __future__ import annotations

import socket


def endpoint_of(host: str, port: int | str) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address, which refuses connections until it listens; port 0 picks a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
