"""Replicas that discovery no longer lists, kept for as long as sessions may still need them."""

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
    unused_since: float | None = None
    """Time since which no session has used it; None while one does."""


class RetiredReplicas:
    """All retired replicas. A verify replica is kept for `verify_seconds` after its last session, because
    keys and values may still be fetched from it; a draft replica goes with its last session.
    """

    def __init__(self, verify_seconds: float) -> None:
        self._seconds_kept = {"draft": 0.0, "verify": verify_seconds}
        self._all: list[Retired] = []

    def __iter__(self) -> Iterator[Retired]:
        return iter(self._all)

    def add(self, kind: str, replica: Replica, channel: grpc.aio.Channel) -> None:
        """Keep a replica that is no longer listed."""
        self._all.append(Retired(kind, replica, channel))

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
        return now - gone.unused_since >= self._seconds_kept[gone.kind]
