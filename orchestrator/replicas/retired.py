"""Replicas that discovery no longer lists, kept while sessions may still need them or they may come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from orchestrator.replicas.pool import Replica


@dataclass(slots=True, eq=False)
class Retired:
    """A replica that is no longer listed, and its channel."""

    kind: str
    replica: Replica
    channel: grpc.aio.Channel
    tls_name: str
    """See `open_channel`."""
    unused_since: float | None = None
    """Time since which no session has used it; None while one does."""


class RetiredReplicas:
    """All retired replicas. Each is kept for `seconds` after its last session: keys and values may still be
    fetched from it, and discovery may list it again. Then its channel is used again, because gRPC keeps some
    memory of every channel that was closed.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds_kept = seconds
        self._all: list[Retired] = []

    def __iter__(self) -> Iterator[Retired]:
        return iter(self._all)

    def add(self, kind: str, replica: Replica, channel: grpc.aio.Channel, tls_name: str) -> None:
        """Keep a replica that is no longer listed."""
        self._all.append(Retired(kind, replica, channel, tls_name))

    def take_back(self, kind: str, endpoint: str, tls_name: str) -> Retired | None:
        """Hand over a replica that is listed again; None when it is not kept."""
        for gone in self:
            if (gone.kind, gone.replica.endpoint, gone.tls_name) == (kind, endpoint, tls_name):
                self._all.remove(gone)
                return gone
        return None

    def channel(self, kind: str, endpoint: str) -> grpc.aio.Channel | None:
        """The channel to a retired replica; None when it is not kept."""
        for gone in self:
            if (gone.kind, gone.replica.endpoint) == (kind, endpoint):
                return gone.channel
        return None

    async def close_unused(self, now: float) -> None:
        """Close the channels that are not needed any more."""
        over = [gone for gone in self if self._is_over(gone, now)]
        self._all = [gone for gone in self if gone not in over]
        for gone in over:
            await gone.channel.close()

    async def close_all(self) -> None:
        """Close all channels, even those that are still needed."""
        for gone in self:
            await gone.channel.close()

    def _is_over(self, gone: Retired, now: float) -> bool:
        if gone.replica.reservations:
            gone.unused_since = None
            return False
        if gone.unused_since is None:
            gone.unused_since = now
        return now - gone.unused_since >= self._seconds_kept
