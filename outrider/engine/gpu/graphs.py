"""Captured forwards: one CUDA graph per token bucket, all in one memory pool.

A graph repeats the launches of one forward over the same memory, which costs the host one call instead of
hundreds. So everything that changes from step to step is in the step's buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

MAX_GRAPH_TOKENS = 512
"""Most tokens of a captured step. A longer step keeps the device busy for longer than the host takes to
launch it."""
MAX_UNWANTED = 128
"""Most rows of logits that a graph may compute without need. Up to about this many, the output layer takes
longer to read its weights than to multiply."""
_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: torch's allocator of pinned memory keeps asking them about their memory."""


class Replay(Protocol):
    """A captured forward."""

    def __call__(self) -> Tensor:
        """Run the forward on what the buffer holds now. The next call overwrites the result."""


class Graphs(Protocol):
    """Captures forwards."""

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """Return a replay of `run`. It is called while nothing else runs on the device."""


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Token counts that graphs are captured for, for steps of up to `most` tokens.

    They are multiples of 8, and beyond 32 at most a quarter is padding. Powers of two would double a step of
    1 + 32 tokens, which is common.
    """
    most = min(most, MAX_GRAPH_TOKENS)
    sizes = [1]
    while (last := sizes[-1]) < most:
        quarter = (last + 1) * 4 // 3 // 8 * 8
        sizes.append(min(max(quarter, min(2 * last, last + 8)), most))
    return tuple(sizes)


def bucket_of(tokens: int, buckets: tuple[int, ...]) -> int | None:
    """Return the smallest bucket that holds `tokens` tokens, or None."""
    return next((bucket for bucket in buckets if tokens <= bucket), None)


class CudaGraphs:
    """Graphs of one device. Replays must not overlap: they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """See Graphs; the first call of `run`, outside the graph, compiles kernels and sizes workspaces.

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
        """Clean up after a failed capture. Where CUDA calls the capture invalid, torch ends neither its
        stream nor its allocations.
        """
        _ABANDONED.append(graph)
        torch.cuda.set_stream(outside)
        with suppress(RuntimeError):  # they have already ended if the capture was valid
            torch._C._cuda_endAllocateToPool(outside.device_index, self._pool)
            torch._C._cuda_releasePool(outside.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # a released pool cannot be used again


class _CudaReplay:
    """A graph and the tensor that it writes its result to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph, self._result = graph, result

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._result
