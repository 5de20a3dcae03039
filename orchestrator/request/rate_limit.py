"""Limits how often one client may call, with a token bucket for each of a bounded number of clients.

A client is known by its bearer token if tokens are required, and otherwise by the address that it calls from:
that of an IPv4 host, or the /64 network of an IPv6 host, because such a client can use every address there.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from outrider.protocol.errors import RateLimited

MAX_CLIENTS = 4096
"""Most clients that have a bucket of their own. Further ones share one bucket while all these are in use."""
OTHERS = "others"
MIN_RETRY_SECONDS = 0.05


class RateLimit:
    """The buckets. Times are those of `clock`, in seconds.

    A bucket is stored as the time at which it will be full again: each request moves that by `1 / rate`
    seconds, to at most `burst / rate` seconds from now. A client with a full bucket is like one that was
    never seen.
    """

    def __init__(
        self,
        rate: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """Allow `rate` requests per second in the long run and `burst` at once; a `rate` of 0 is no limit."""
        self._cost = 1.0 / rate if rate > 0 else 0.0
        self._room = burst * self._cost
        self._clock = clock
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """Times in seconds by client, the least recently served first."""

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client: str) -> None:
        """Count one request.

        Raises:
            RateLimited: the client's bucket is empty; `retry_after` is the time until it is not, in seconds.
        """
        if self._cost == 0.0:
            return
        now = self._clock()
        client = self._known(client, now)
        full_at = max(self._full_at.get(client, now), now) + self._cost
        excess = full_at - now - self._room
        if excess > self._cost * 1e-6:  # a rounding error is not an excess
            raise RateLimited(
                f"more than {1.0 / self._cost:g} requests per second from one client",
                max(excess, MIN_RETRY_SECONDS),
            )
        self._full_at[client] = full_at
        self._full_at.move_to_end(client)

    def _known(self, client: str, now: float) -> str:
        """The key of the client's bucket: its own, or `OTHERS` when there is no room for another bucket."""
        if client in self._full_at or len(self._full_at) < self._max_clients:
            return client
        oldest = next(iter(self._full_at))
        if self._full_at[oldest] <= now:
            del self._full_at[oldest]
            return client
        return OTHERS


def client_of(digest: bytes, peer: str) -> str:
    """The caller: its bearer token's digest if one was checked, otherwise the address in gRPC's `peer`."""
    return f"token {digest.hex()}" if digest else f"address {_network(peer)}"


def _network(peer: str) -> str:
    """The host of a peer such as `ipv4:10.0.0.7:4711`, or its network such as `2001:db8::`."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return kind
    if parsed.version == 6 and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else str(parsed)
