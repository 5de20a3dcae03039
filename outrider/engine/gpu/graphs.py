"""Captured forwards: one CUDA graph per token bucket, all in one memory pool.

A graph repeats the launches of one forward over the same memory, which costs the host one call instead of
hundreds. So everything that changes from step to step stands in the step's buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

MAX_GRAPH_TOKENS = 512
"""A longer step keeps the device busy for longer than its launches take the host."""
MAX_UNWANTED = 128
"""Rows of logits that a graph may compute for nobody: up to about so many, the output layer reads its weights
for longer than it multiplies."""
_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: torch's allocator of pinned memory keeps asking them whose memory it is."""


class Replay(Protocol):
    """A captured forward."""

    def __call__(self) -> Tensor:
        """Run it on what the buffer holds now; the result is overwritten by the next call."""


class Graphs(Protocol):
    """Captures forwards."""

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """A replay of `run`, which is called while nothing else runs."""


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Token counts that graphs are captured for, for steps of up to `most` tokens.

    Multiples of 8, and beyond 32 at most a quarter of padding: powers of two alone would double a step of
    1 + 32 tokens, which is common.
    """
    most = min(most, MAX_GRAPH_TOKENS)
    sizes = [1]
    while (last := sizes[-1]) < most:
        quarter = (last + 1) * 4 // 3 // 8 * 8
        sizes.append(min(max(quarter, min(2 * last, last + 8)), most))
    return tuple(sizes)


def bucket_of(tokens: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds so many tokens; None: there is none."""
    return next((bucket for bucket in buckets if tokens <= bucket), None)


class CudaGraphs:
    """Graphs of one device. Replays must not overlap: they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """See Graphs; the first call of `run` compiles kernels and sizes workspaces, outside of the graph.

        Raises:
            RuntimeError: the forward does something that no graph can hold, such as waiting for the device.
            TritonError: a kernel does not compile or does not fit the device.
        """
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                run()
            outside.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    result = run()
            except Exception:
                self._abandon(graph, outside)
                raise
        return _CudaReplay(graph, result)

    def _abandon(self, graph: torch.cuda.CUDAGraph, outside: torch.cuda.Stream) -> None:
        """Leave a capture that failed: torch ends neither its stream nor its allocations where CUDA says that
        the capture is invalid.
        """
        _ABANDONED.append(graph)
        torch.cuda.set_stream(outside)
        with suppress(RuntimeError):  # they have ended where the capture was valid until then
            torch._C._cuda_endAllocateToPool(outside.device_index, self._pool)
            torch._C._cuda_releasePool(outside.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # a pool that was released takes nothing more


class _CudaReplay:
    """One graph and where it leaves its result."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph, self._result = graph, result

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._result
