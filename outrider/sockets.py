"""Addresses, and sockets that are bound before the process that listens on them is started."""

from __future__ import annotations

import re
import socket
from typing import Any

from outrider.protocol.errors import ConfigError

MAX_PORT = 65535


def endpoint_of(host: str, port: int | str) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_endpoint(text: str) -> bool:
    """Whether gRPC can resolve a text: `host:port`, perhaps with a scheme such as dns:, or `unix:path`."""
    if text.startswith("unix:"):
        return True
    found = re.fullmatch(r"(?!https?://).+:([0-9]{1,5})", text)
    return found is not None and int(found[1]) <= MAX_PORT


def resolve(host: str, port: int, flags: int = 0) -> list[Any]:
    """The answers of `socket.getaddrinfo` for TCP.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # such as a..b, which Python cannot even ask for
        raise socket.gaierror(socket.EAI_NONAME, "this is no name of a host") from error


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address, which refuses connections until `listen`; port 0 picks a free one.

    Nobody else can bind the address from now on: Linux would let others that may reuse it, until one listens.

    Raises:
        OSError: the address cannot be bound.
    """
    family, kind, protocol, _, address = resolve(host, port, socket.AI_PASSIVE)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        made.close()
        raise
    return made


def cannot_listen(setting: str, where: str, error: OSError) -> ConfigError:
    """The error for an address, `where`, that a setting names and that cannot be bound."""
    return ConfigError(f"{setting}: cannot listen on {where} ({error.strerror}); choose another")


def listen(listener: socket.socket, backlog: int = socket.SOMAXCONN) -> None:
    """Accept connections on a bound socket, also where some to an earlier process are not forgotten yet.

    Raises:
        OSError: another process listens there.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen(backlog)
