"""Ranks as threads of this process: what `outrider.engine.parallel.ranks.Ranks` does, without processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.parallel.ranks import Words

SECONDS = 60.0


class Table:
    """Where the threads meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.said: dict[str, str] = {}
        self.changed = threading.Condition()
        self.steps: list[queue.Queue[Words]] = [queue.Queue() for _ in range(size)]


class ThreadRanks:
    """One thread's side."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size
        self.sent: list[Words] = []
        self.failed = False

    def report(self, stage: str, content: str = "") -> None:
        """See `Ranks`."""
        with self._table.changed:
            self._table.said[f"{stage}/{self.rank}"] = content
            self._table.changed.notify_all()

    def wait_for(self, stage: str, ranks: Sequence[int] | None = None) -> list[str]:
        """See `Ranks`."""
        keys = [f"{stage}/{rank}" for rank in (range(self.size) if ranks is None else ranks)]
        with self._table.changed:
            assert self._table.changed.wait_for(lambda: self._table.said.keys() >= set(keys), SECONDS), stage
            return [self._table.said[key] for key in keys]

    def meet(self, stage: str) -> None:
        """See `Ranks`."""
        self.report(stage)
        self.wait_for(stage)

    def send(self, words: Words) -> None:
        """See `Ranks`."""
        self.sent.append(words)
        for steps in self._table.steps[1:]:
            steps.put(words)

    def receive(self) -> Words:
        """See `Ranks`."""
        return self._table.steps[self.rank].get(timeout=SECONDS)

    def sum(self, part: Tensor) -> Tensor:
        """See `Ranks`."""
        first, *others = self._exchange(part)
        total = first.float().clone()
        for other in others:
            total += other
        return total.to(part.dtype)

    def columns(self, part: Tensor) -> Tensor:
        """See `Ranks`."""
        parts = self._exchange(part)
        return torch.cat(parts, 1) if self.rank == 0 else part

    def _exchange(self, part: Tensor) -> list[Tensor]:
        self._table.parts[self.rank] = part
        self._table.barrier.wait()
        parts = list(self._table.parts)
        self._table.barrier.wait()
        return parts
