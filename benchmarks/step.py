"""The CPU time of one step and its parts: a target's or draft's forward, choosing, and a whole draft step.

    python -m benchmarks.step models/demo/draft

    forward      of some tokens behind a context: by the model's own modules, by the fused decoder, and the
                 matrix products of that alone, all in turn; overhead is what it adds to them;
                 / floor: the fused decoder, of the least time that reading the weights takes one core
    choosing     the target's token at as many rows, and a draft's ranking; with --sweep behind so many MB of
                 memory that were written, as the products of a large model leave the caches
    draft step   of a session whose verdicts follow a real text: forward, ranking, moving entries, the rest

The time of this thread, not of the wall; least and median in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

import draft_service.drafters.model as model_drafter
from benchmarks import machine
from benchmarks.flags import new_parser
from benchmarks.floor import Floor, measure_floor
from draft_service.core import DraftCore
from draft_service.mailbox import Commit, DraftStream, Message, Open
from outrider.config import DraftConfig
from outrider.engine.cpu.linear import CpuLinear
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading.loader import load_model
from outrider.engine.quantization.rounding import BITS
from outrider.engine.runner import ModelRunner, Segment
from outrider.protocol.messages import OpenDraft, SamplingParams, StepTimes, Verdict
from outrider.rpc.queues import Outbox, Stream
from outrider.sampling.chooser import SamplingRow, choose, rank
from outrider.sampling.history import History
from outrider.telemetry.instruments import DraftInstruments
from scripts import console

PAGES = 512
WARM_UP = 3
PROMPT = 256
"""Tokens before the first drafted one."""
STEPS_PER_ROUND = 8
"""Draft steps between two verdicts."""
TARGET_FORWARD_US = 15_000
"""What the verdicts say."""
TEXT = Path(__file__).with_name("prompts.txt")


def main() -> int:
    """Measure and print."""
    flags = _flags()
    torch.set_num_threads(1)
    print(machine.lines(machine.describe()) + "\n")
    text = Tokenizer.from_file(str(flags.model / "tokenizer.json")).encode(TEXT.read_text()).ids
    fused, modules = (_load(flags, fused=fused) for fused in (True, False))
    floor = measure_floor(flags.model, fused.dtype_name, len(machine.cores()), flags.weights)
    print(f"floor: {floor}\n")
    print("rows          modules            fused         products  overhead  / floor   (least / median ms)")
    for rows in flags.rows:
        print(_forward_line(rows, fused, modules, text[: flags.context], flags.rounds, floor))
    logits = _some_logits(fused, text)
    print("\nrows   T         choosing          ranking")
    for rows in flags.rows:
        for temperature in flags.temperatures:
            print(_choosing_line(logits[:rows], temperature, flags.rounds, flags.sweep))
    print("\n  T  draft step           least / median ms   steps")
    for temperature in flags.temperatures:
        print("\n".join(_draft_lines(fused, temperature, text, flags.rounds)))
    return 0


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", choices=("full", *BITS), default="full")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens before those of the step")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--sweep", type=int, default=0, help="MB that pass through the caches before choosing"
    )
    return parser.parse_args()


def _load(flags: argparse.Namespace, *, fused: bool) -> LoadedModel:
    say = console.progress if fused else None
    return load_model(
        str(flags.model),
        dtype=flags.dtype,
        device="cpu",
        threads=1,
        fused=fused,
        weights=flags.weights,
        progress=say,
    )


def _times(calls: Sequence[Callable[[], object]], rounds: int, sweep: int = 0) -> list[list[float]]:
    """Milliseconds of each call per round, all in turn, each behind a sweep of so many MB."""
    spent: list[list[float]] = [[] for _ in calls]
    swept = torch.zeros(sweep * 2**18)
    for turn in range(-WARM_UP, rounds):
        for times, call in zip(spent, calls, strict=True):
            swept.add_(1.0)
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
    calls = [_forward(modules, rows, context), _forward(fused, rows, context), _products(fused, rows)]
    modules_ms, fused_ms, products_ms = _times(calls, rounds)
    overhead = min(fused_ms) - min(products_ms)
    of_floor = min(fused_ms) / floor.seconds() / 1e3
    times = f"{_pair(modules_ms)}{_pair(fused_ms)}{_pair(products_ms)}"
    return f"{rows:4}{times}{overhead:10.3f}{of_floor:9.2f}"


def _forward(loaded: LoadedModel, rows: int, context: Sequence[int]) -> Callable[[], None]:
    """A forward of `rows` tokens behind a context, their logits included."""
    runner = ModelRunner(loaded, PAGES, PAGE_SIZE)
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, context, None, [])])
    runner.commit(kv, range(len(context)), context)
    segments = [Segment(kv, context[:rows], None, range(rows))]

    def forward() -> None:
        runner.forward(segments)
        kv.rollback()

    return forward


def _products(loaded: LoadedModel, rows: int) -> Callable[[], None]:
    """The packed matrix products of a forward, alone."""
    layers = [module for module in loaded.model.modules() if isinstance(module, CpuLinear)]
    inputs = [torch.randn(rows, layer.in_features).to(loaded.dtype) for layer in layers]

    def multiply() -> None:
        with torch.inference_mode():
            for layer, x in zip(layers, inputs, strict=True):
                layer.forward(x)

    return multiply


def _some_logits(loaded: LoadedModel, text: Sequence[int]) -> torch.Tensor:
    """[16 or more, V] of positions in a text."""
    runner = ModelRunner(loaded, PAGES, PAGE_SIZE)
    kv = SequenceKv.open(runner.pool, [])
    return runner.forward([Segment(kv, text[:PROMPT], None, range(0, PROMPT, 4))])


def _choosing_line(logits: torch.Tensor, temperature: float, rounds: int, sweep: int) -> str:
    count = len(logits)
    params, history = SamplingParams(temperature=temperature, seed=7), History(())
    rows = [SamplingRow(params, 100 + index, index, history) for index in range(count)]
    children = DraftConfig().children
    chosen, ranked = _times(
        [lambda: choose(logits, rows, ()), lambda: rank(logits, rows, children, 1.0, ())], rounds, sweep
    )
    return f"{count:4}{temperature:4}{_pair(chosen)}{_pair(ranked)}"


class _Stopwatch:
    """Milliseconds spent in some functions since the last `read`."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            self._spent[name] = self._spent.get(name, 0.0) + (time.thread_time() - start) * 1e3
            return result

        return timed

    def read(self) -> dict[str, float]:
        """What was spent, by name."""
        spent, self._spent = self._spent, {}
        return spent


class _Sink(Outbox[Any]):
    """An outbox that nobody reads."""

    full = False


def _draft_lines(loaded: LoadedModel, temperature: float, text: Sequence[int], rounds: int) -> list[str]:
    watch = _Stopwatch()
    runner: Any = ModelRunner(loaded, PAGES, PAGE_SIZE)
    runner.forward = watch.around("forward", runner.forward)
    runner.commit = watch.around("moving", runner.commit)
    config = DraftConfig()
    drafter = model_drafter.ModelDrafter(runner, children=config.children, max_nodes=config.max_nodes)
    core = DraftCore(drafter, config, DraftInstruments(CollectorRegistry()), lambda deliveries: None)
    params = SamplingParams(temperature=temperature, seed=1)
    prompt = tuple(text[:PROMPT])
    opening = OpenDraft(request_id="step", token_ids=prompt, prompt_length=PROMPT, sampling=params)
    stream: DraftStream = Stream(1, _Sink(1, lambda: None))
    messages: list[Message] = [Open(stream, opening)]
    with patch.object(model_drafter, "rank", watch.around("ranking", rank)):
        while core.turn(messages) is not None:
            messages = []
        steps = _follow(core, stream, text, watch, rounds)
    names = ("whole", "forward", "ranking", "moving", "rest")
    return [
        f"{temperature:3}  {name:9}{_pair([step[name] for step in steps]):>30}   {len(steps):5}"
        for name in names
    ]


def _follow(
    core: DraftCore, stream: DraftStream, text: Sequence[int], watch: _Stopwatch, rounds: int
) -> list[dict[str, float]]:
    """Commit the text as far as the tree holds it and one token more, then draft; what each step took."""
    steps: list[dict[str, float]] = []
    for turn in range(1, rounds + 1):
        tree = core._entries[stream.id].session.tree
        place = tree.committed_length
        children, tokens = tree.children, [text[place]]
        while tokens[-1] in children:
            children = children[tokens[-1]].children
            tokens.append(text[place + len(tokens)])
        times = StepTimes(forward_us=TARGET_FORWARD_US)
        verdict = Verdict(turn, place, tuple(tokens), times=times)
        messages: list[Message] = [Commit(stream, verdict, time.perf_counter())]
        while len(steps) < turn * STEPS_PER_ROUND and (step := _timed_step(core, messages, watch)):
            steps.append(step)
            messages = []
    return steps


def _timed_step(core: DraftCore, messages: Sequence[Message], watch: _Stopwatch) -> dict[str, float]:
    """What one step and its parts took; empty when there was nothing to expand."""
    watch.read()
    start = time.thread_time()
    if core.turn(messages) is None:
        return {}
    whole, spent = (time.thread_time() - start) * 1e3, watch.read()
    parts = {name: spent.get(name, 0.0) for name in ("forward", "ranking", "moving")}
    return {"whole": whole, **parts, "rest": whole - sum(parts.values())}


if __name__ == "__main__":
    console.run(main)
