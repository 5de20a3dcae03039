"""Communication between the processes that hold one model, through torch.distributed; what the CPUs of one
machine add up or gather goes through shared memory, unless it is large.

There are two groups. Products and logits use one with short timeouts, so that a rank that hangs is noticed.
Steps use the other, on which ranks wait as long as there is nothing to do.

Sums add the parts of all ranks in the order of the ranks, in float32. So all ranks have the same bits, which,
unlike those of an all-reduce, depend neither on timing nor on the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from outrider.engine.parallel.board import MAX_BYTES, Board
from outrider.protocol.errors import LostRank, first_line

Words = npt.NDArray[np.int64]
MAX_WAIT_SECONDS = 60.0
"""Longest wait for another rank's part of a product. A rank that takes longer counts as hanging."""
MAX_LOAD_SECONDS = 600.0
"""Longest wait for another rank to start, or to load a part as large as this rank's."""
_NO_LIMIT = timedelta(days=365)
_FIRST_WORDS = 1024
"""Words of a step that are sent together with its length; few steps have more."""
_POLL_SECONDS = 0.05
"""Pause between two looks for what another rank reports at start."""


class Ranks:
    """The ranks of a model, as one of them, this process, sees them; rank 0 leads. One thread at a time may
    use it."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        seconds: float = MAX_WAIT_SECONDS,
        check: Callable[[], None] = lambda: None,
        board: str = "",
    ) -> None:
        """Wait for the other ranks and connect to them; `check` is called meanwhile and may raise. `board` is
        the file of the shared memory; empty: there is none.

        Raises:
            LostRank: one did not come.
        """
        self.rank, self.size = rank, size
        self._store, self._check = store, check
        self._failed = False
        self._board = Board(board, rank, size, seconds=seconds, check=check) if board else None
        self._words = torch.zeros(_FIRST_WORDS, dtype=torch.int64)
        self.meet("started")
        with self._noticing():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
            )
            # Rank 0 waits until the others take a step. The others wait until there is one.
            wait = timedelta(seconds=seconds) if rank == 0 else _NO_LIMIT
            self._steps = dist.new_group(backend="gloo", timeout=wait)

    def report(self, stage: str, content: str = "") -> None:
        """Report that this rank has reached a stage, with some content."""
        self._store.set(f"{stage}/{self.rank}", content)

    def meet(self, stage: str) -> None:
        """Reach a stage together.

        Raises:
            LostRank: a rank did not within MAX_LOAD_SECONDS.
        """
        self.report(stage)
        self.wait_for(stage)

    def wait_for(self, stage: str, ranks: Sequence[int] | None = None) -> list[str]:
        """Return what all ranks, or `ranks`, reported when they reached a stage.

        Raises:
            LostRank: a rank did not reach it within MAX_LOAD_SECONDS.
        """
        wanted = range(self.size) if ranks is None else ranks
        keys = [f"{stage}/{rank}" for rank in wanted]
        end = time.monotonic() + MAX_LOAD_SECONDS
        with self._noticing():
            while not self._store.check(keys):
                self._check()
                if time.monotonic() > end:
                    raise LostRank(
                        f"tensor_parallel: a rank did not come to {stage!r} in {MAX_LOAD_SECONDS:g} s"
                    )
                time.sleep(_POLL_SECONDS)
            return [self._store.get(key).decode() for key in keys]

    def send(self, words: Words) -> None:
        """Send a step [n] int64 to the other ranks; only for rank 0.

        Raises:
            LostRank: one is gone.
        """
        self._words[0] = len(words)
        first = torch.from_numpy(words[: _FIRST_WORDS - 1])
        self._words[1 : 1 + len(first)] = first
        with self._noticing():
            dist.broadcast(self._words, 0, group=self._steps)
            if len(words) > len(first):
                dist.broadcast(torch.from_numpy(words[len(first) :].copy()), 0, group=self._steps)

    def receive(self) -> Words:
        """Wait for the next step [n] int64 of rank 0, without a timeout; only for the other ranks.

        Raises:
            LostRank: rank 0 is gone.
        """
        with self._noticing():
            dist.broadcast(self._words, 0, group=self._steps)
            count, room = int(self._words[0]), _FIRST_WORDS - 1
            words = torch.empty(count, dtype=torch.int64)
            words[:room] = self._words[1 : 1 + min(count, room)]
            if count > room:
                dist.broadcast(words[room:], 0, group=self._steps)
        received: Words = words.numpy()
        return received

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, on every rank, in the dtype of the parts.

        Raises:
            LostRank: one is gone, or hangs.
        """
        parts = self._on_board(part)
        if parts is None:
            parts = part.new_empty(self.size, *part.shape)
            with self._noticing():
                dist.all_gather(list(parts.unbind(0)), part.contiguous())
        total = parts[0].to(torch.float32, copy=True)
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def columns(self, part: Tensor) -> Tensor:
        """[N, n] of each rank -> [N, ranks * n] on rank 0, side by side; other ranks get their own part back.

        Raises:
            LostRank: one is gone, or hangs.
        """
        parts = self._on_board(part)
        if parts is None:
            parts = part.new_empty(self.size if self.rank == 0 else 0, *part.shape)
            with self._noticing():
                dist.gather(part.contiguous(), list(parts) or None, dst=0)
        return torch.cat(list(parts), dim=1) if self.rank == 0 else part

    def _on_board(self, part: Tensor) -> Tensor | None:
        """Return all ranks' parts [ranks, *part.shape], in memory that the next call overwrites; None if
        they are too large for the shared memory, or there is none."""
        if self._board is None or part.nbytes > MAX_BYTES:
            return None
        with self._noticing():
            return self._board.gather(part)

    def leave(self) -> None:
        """Disconnect; the last call."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def failed(self) -> bool:
        """True once a rank is known to be gone."""
        return self._failed

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except LostRank:  # from `check`
            self._failed = True
            raise
        except RuntimeError as error:
            self._failed = True
            self._check()  # may raise a clearer error
            raise LostRank(f"tensor_parallel: a rank is gone or hangs ({first_line(error)})") from error
