"""Shared by the sections of benchmarks/gpu.py: the device, the figures so far, and how time is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_pair import committed, greedy_rows, tree_segment
from outrider.engine.gpu.graphs import MAX_GRAPH_TOKENS, CudaGraphs, Replay, buckets_up_to
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.runner import ModelRunner
from outrider.sampling.chooser import choose

PAGE = 16


class Uncaptured:
    """Stands in for CUDA graphs: launches the same forward one kernel after the other."""

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """See `outrider.engine.gpu.graphs.Graphs`."""
        run()
        return run


@dataclass
class Line:
    """One figure."""

    section: str
    what: str
    value: str
    goal: str = ""


@dataclass
class Bench:
    """The device, the models made so far, and the figures so far."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool
    runs: int
    out: Path
    lines: list[Line] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)
    section: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def contexts(self) -> list[int]:
        """Committed tokens before a measured step."""
        return [20] if self.tiny else [256, 2048, 8192]

    @property
    def room(self) -> int:
        """Tokens in the target's pages: eight of the longest contexts, and what steps add."""
        return 8 * (self.contexts[-1] + 512)

    def say(self, what: str, value: str, goal: str = "") -> None:
        """Print one figure, and keep it."""
        self.lines.append(Line(self.section, what, value, goal))
        print(
            f"{time.monotonic() - self.began:6.1f}s  {self.section:<12} {what:<58} {value:>22}  {goal}",
            flush=True,
        )

    def runner(self, loaded: LoadedModel, tokens: int, buckets: tuple[int, ...] = ()) -> GraphRunner:
        """A runner with room for `tokens` tokens, and graphs of these buckets, or of all."""
        graphs: Any = Uncaptured() if self.device.type == "cpu" else None
        buckets = (1, 8, 40) if self.tiny else buckets or buckets_up_to(MAX_GRAPH_TOKENS)
        return GraphRunner(loaded, -(-tokens // PAGE), PAGE, buckets=buckets, graphs=graphs)

    def wall_ms(self, run: Callable[[], object]) -> float:
        """Median milliseconds of a call that ends with a read from the device."""
        for _ in range(3):
            run()
        return statistics.median(self._timed(run) for _ in range(self.runs))

    def device_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds per call when calls follow each other without waiting."""
        run()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(self.runs):
            run()
        self.synchronize()
        return (time.perf_counter() - start) / self.runs * 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _timed(self, run: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3


def captured_ms(bench: Bench, run: Callable[[Any], Tensor], over: Sequence[Any]) -> float:
    """Milliseconds of one graph that calls `run` with each of `over`, such as weights."""
    graphs: Any = Uncaptured() if bench.device.type == "cpu" else CudaGraphs(bench.device)
    return bench.device_ms(graphs.capture(lambda: [run(each) for each in over][-1]))


@contextmanager
def repeated_forward(
    runner: ModelRunner, contexts: Sequence[int], nodes: int
) -> Iterator[Callable[[], Tensor]]:
    """Yield the forward of a step that can run again and again: for each context a sequence with a tree of
    `nodes` nodes."""
    kvs = [committed(runner, context) for context in contexts]

    def forward() -> Tensor:
        for kv in kvs:
            kv.rollback()
        return runner.forward([tree_segment(kv, nodes) for kv in kvs])

    yield forward
    for kv in kvs:
        kv.release()


def one_step(bench: Bench, runner: ModelRunner, context: int, nodes: int) -> tuple[float, float]:
    """Milliseconds of a step whose result is read, and of one of many steps that are not read."""
    rows = greedy_rows(context, 1 + nodes)
    with repeated_forward(runner, [context], nodes) as forward:
        return bench.wall_ms(lambda: choose(forward(), rows, ())), bench.device_ms(forward)
