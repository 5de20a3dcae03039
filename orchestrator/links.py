"""The streams that a pipeline holds open: each with its task, and its reservation on a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.replicas.draft_client import DraftClient
from orchestrator.replicas.pool import Replicas, Reservation
from orchestrator.replicas.verify_client import VerifyClient
from outrider.protocol.messages import ModelInfo

Client = TypeVar("Client", VerifyClient, DraftClient)


@dataclass(slots=True)
class Link(Generic[Client]):
    """One stream; `pool` has the replicas of its kind."""

    kind: str
    client: Client
    pool: Replicas
    task: asyncio.Task[None] | None = None
    reservation: Reservation | None = None
    """None before a replica is found."""
    sent_block: bool = False
    """True once a draft has sent a block."""
    proven: bool = False

    @property
    def endpoint(self) -> str:
        """Endpoint of its replica; empty before one is found."""
        return "" if self.reservation is None else self.reservation.replica.endpoint

    @property
    def info(self) -> ModelInfo | None:
        """What its replica serves; None before one is found."""
        return None if self.reservation is None else self.reservation.replica.info

    def prove(self) -> None:
        """Note that the replica did its part. A draft's first block is no proof: a flood may follow."""
        if not self.proven and self.reservation is not None:
            self.pool.succeeded(self.reservation)
            self.proven = True

    def release(self) -> None:
        """Free the session's place at the replica for another session."""
        if self.reservation is not None:
            self.pool.release(self.reservation)

    def let_go(self) -> None:
        """End the stream, and release the replica."""
        if self.task is not None:
            self.task.cancel()
        self.release()


@contextmanager
def first_error() -> Iterator[None]:
    """A context around a task group that raises the first error itself instead of a group of errors."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
