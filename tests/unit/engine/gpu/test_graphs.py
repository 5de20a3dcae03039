"""Capturing leaves torch as it was, whether it succeeds or not; streams and graphs are stand-ins."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.gpu import graphs
from outrider.engine.gpu.graphs import MAX_GRAPH_TOKENS, CudaGraphs, bucket_of, buckets_up_to

POOL = (0, 7)


class Cuda:
    """What a capture changes in torch: the current stream, and the pools that allocations go to.

    As torch's own, a capture that CUDA calls invalid ends with an error that leaves both as they are.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outside = SimpleNamespace(name="outside", device_index=0, wait_stream=lambda other: None)
        self.side = SimpleNamespace(name="side", device_index=0, wait_stream=lambda other: None)
        self.current, self.capturing, self.held = self.outside, [], []
        for name, value in {
            "graph_pool_handle": lambda: POOL,
            "Stream": lambda device: self.side,
            "current_stream": lambda: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "device": lambda device: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda _, pool: self.held.remove(pool), raising=False
        )
        monkeypatch.setattr(graphs, "_ABANDONED", [])

    def set_stream(self, stream) -> None:
        """See torch.cuda.set_stream."""
        self.current = stream

    @contextmanager
    def stream(self, stream):
        """See torch.cuda.stream."""
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        """See torch.cuda.graph."""
        before, self.current = self.current, stream
        self.capturing.append(pool)
        self.held.append(pool)
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        except ValueError:
            self.capturing.remove(pool)
            self.current = before
            raise
        self.capturing.remove(pool)
        self.current = before

    def end(self, device, pool) -> None:
        """See CUDACachingAllocator::endAllocateToPool."""
        if pool not in self.capturing:
            raise RuntimeError("not currently recording to mempool_id")
        self.capturing.remove(pool)


def test_a_capture_returns_the_result_of_each_replay(monkeypatch):
    """The tensor that the captured run left."""
    cuda, result = Cuda(monkeypatch), torch.zeros(3)
    replay = CudaGraphs(torch.device("cuda:0")).capture(lambda: result)
    assert replay() is result
    assert (cuda.current, cuda.capturing, graphs._ABANDONED) == (cuda.outside, [], [])


def test_an_invalid_capture_leaves_no_stream_and_no_allocations(monkeypatch):
    """Torch stops half way through ending it: the rest is done here, and the graph lives on."""
    cuda, runs = Cuda(monkeypatch), []

    def run():
        runs.append(cuda.current.name)
        if len(runs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphs(torch.device("cuda:0")).capture(run)
    assert runs == ["side", "side"]
    assert (cuda.current, cuda.capturing, cuda.held) == (cuda.outside, [], [])
    assert len(graphs._ABANDONED) == 1


def test_after_a_failure_graphs_get_another_pool(monkeypatch):
    """The one of the failed capture was released."""
    cuda, pools = Cuda(monkeypatch), iter([(0, 7), (0, 8)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    captures, failing = CudaGraphs(torch.device("cuda:0")), iter([0, 1])

    def run():
        if next(failing, 0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(1)

    with pytest.raises(RuntimeError):
        captures.capture(run)
    captures.capture(run)
    assert cuda.held == [(0, 8)]


def test_a_run_that_fails_by_itself_is_left_too(monkeypatch):
    """Torch has ended a capture that was valid: nothing is ended twice."""
    cuda, runs = Cuda(monkeypatch), []

    def run():
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("another shape")
        return torch.zeros(1)

    with pytest.raises(ValueError, match="another shape"):
        CudaGraphs(torch.device("cuda:0")).capture(run)
    assert (cuda.current, cuda.capturing) == (cuda.outside, [])


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (3, 4), (8, 8), (9, None)])
def test_the_smallest_bucket_that_holds_a_step(tokens, bucket):
    """None: it runs without a graph."""
    assert bucket_of(tokens, (1, 2, 4, 8)) == bucket


@pytest.mark.parametrize("most", [1, 3, 33, 136, 264, 512])
def test_buckets_hold_every_step_with_little_padding(most):
    """Up to the longest step: at most a quarter is padding beyond 32 tokens, and at most 7 tokens before."""
    buckets = buckets_up_to(most)
    assert list(buckets) == sorted(set(buckets))
    for tokens in range(1, most + 1):
        bucket = bucket_of(tokens, buckets)
        assert bucket is not None
        padding = bucket - tokens
        assert padding * 4 <= bucket if tokens > 32 else padding <= 7
    assert buckets[-1] == most


def test_longer_steps_have_no_buckets():
    """Whatever a service allows."""
    assert buckets_up_to(4096)[-1] == MAX_GRAPH_TOKENS
