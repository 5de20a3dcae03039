"""Measures the CPU time of one forward by the model's own modules, by the fused decoder, and by its products.

    python -m benchmarks.step models/demo/draft

All in turn, over some tokens after a context. Overhead is what the decoder adds to its products; ÷ floor is
its time over the least that one core takes to read the weights. The time of this thread, not of the wall;
least and median in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.floor import Floor, measure_floor
from benchmarks.workload import PROMPTS
from outrider.cli import values
from outrider.cli.prompt_ids import token_ids_of
from outrider.cores import allowed_cores
from outrider.engine.cpu.linear import CpuLinear
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.quantization.rounding import BITS
from outrider.engine.runner import ModelRunner, Segment
from scripts import console

PAGES = 512
WARM_UP = 3


def main() -> int:
    """Measure and print."""
    flags = _flags()
    torch.set_num_threads(1)
    print(machine.lines(machine.describe()) + "\n")
    text = token_ids_of([PROMPTS.read_text()], str(flags.model))[0]
    fused, modules = (_load(flags, fused=fused) for fused in (True, False))
    floor = measure_floor(flags.model, fused.dtype_name, len(allowed_cores()), flags.weights)
    print(f"floor: {floor}\n")
    print("rows          modules            fused         products  overhead  ÷ floor   (least / median ms)")
    for rows in flags.rows:
        print(_forward_line(rows, fused, modules, text[: flags.context], flags.rounds, floor))
    return 0


def _flags() -> argparse.Namespace:
    parser = console.new_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", choices=("full", *BITS), default="full")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--context", type=values.count, default=200, help="tokens before those of the step")
    parser.add_argument("--rounds", type=int, default=100)
    return parser.parse_args()


def _load(flags: argparse.Namespace, *, fused: bool) -> LoadedModel:
    say = console.progress if fused else lambda _: None
    return load_model(
        str(flags.model),
        dtype=flags.dtype,
        device="cpu",
        threads=1,
        fused=fused,
        weights=flags.weights,
        say=say,
    )


def in_turn(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Milliseconds of each call per round, all in turn."""
    spent: list[list[float]] = [[] for _ in calls]
    for turn in range(-WARM_UP, rounds):
        for times, call in zip(spent, calls, strict=True):
            start = time.thread_time()
            call()
            if turn >= 0:
                times.append((time.thread_time() - start) * 1e3)
    return spent


def _pair(times: Sequence[float]) -> str:
    return f"  {min(times):6.3f} / {sorted(times)[len(times) // 2]:6.3f}"


def _forward_line(
    rows: int, fused: LoadedModel, modules: LoadedModel, context: Sequence[int], rounds: int, floor: Floor
) -> str:
    arms = [Arm(ModelRunner(loaded, PAGES, PAGE_SIZE), context) for loaded in (modules, fused)]
    tokens = repeated(context, rows)
    calls = [arm.forward(Segment(arm.kv, tokens, None, range(rows))) for arm in arms]
    modules_ms, fused_ms, products_ms = in_turn([*calls, _products(fused, rows)], rounds)
    overhead = min(fused_ms) - min(products_ms)
    of_floor = min(fused_ms) / floor.seconds() / 1e3
    times = f"{_pair(modules_ms)}{_pair(fused_ms)}{_pair(products_ms)}"
    return f"{rows:4}{times}{overhead:10.3f}{of_floor:9.2f}"


def repeated(context: Sequence[int], rows: int) -> list[int]:
    """The tokens of a step, which may be more than those of its context."""
    return [context[place % len(context)] for place in range(rows)]


class Arm:
    """A runner with one sequence that has a context."""

    def __init__(self, runner: ModelRunner, context: Sequence[int]) -> None:
        self.runner, self.kv = runner, SequenceKv.open(runner.pool, [])
        length = len(context)
        runner.forward([Segment(self.kv, context, None, [length - 1], certain=length)])
        runner.commit(self.kv, range(length), context)

    def forward(self, segment: Segment) -> Callable[[], None]:
        """Return a function that computes a segment of the sequence and forgets it."""

        def forward() -> None:
            self.runner.forward([segment])
            self.kv.rollback()

        return forward


def _products(loaded: LoadedModel, rows: int) -> Callable[[], None]:
    """Return a function that computes only the packed matrix products of a forward."""
    layers = [module for module in loaded.model.modules() if isinstance(module, CpuLinear)]
    inputs = [torch.randn(rows, layer.in_features).to(loaded.dtype) for layer in layers]

    def multiply() -> None:
        with torch.inference_mode():
            for layer, x in zip(layers, inputs, strict=True):
                layer.forward(x)

    return multiply


if __name__ == "__main__":
    console.run(main)
