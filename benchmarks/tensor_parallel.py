"""Compares one process of one core with several of one core each: milliseconds of a step, and tokens/s.

    python -m benchmarks.tensor_parallel
    python -m benchmarks.tensor_parallel --pair demo --steps 20 --rounds 2     # a trial of the benchmark

A step decodes one token of each sequence. Both arms are loaded at once and run in turn, rank 0 on the first
core and the others on the next ones; while one arm runs, the other sleeps. The median step is shown. Without
services: `benchmarks.compare` measures end to end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks import machine, pairs
from outrider.config import VerifyConfig
from outrider.cores import allowed_cores
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.replica import largest_step, load_runner
from outrider.engine.parallel.leader import load_parallel
from outrider.engine.parallel.order import cpu_share
from outrider.engine.runner import ModelRunner, Segment
from outrider.process import pin_cpus
from scripts import console

WARM_UP = 3


def main() -> int:
    """Measure and print."""
    flags = _flags()
    cores = allowed_cores()[: flags.ranks]
    if len(cores) < flags.ranks:
        console.progress(
            f"{flags.ranks} ranks need as many cores, and there are {len(cores)}: set --ranks lower"
        )
        return 2
    pair = pairs.load_pair(flags)
    config = _config(flags, pair, cores)
    print(machine.lines(machine.describe()))
    print(f"target: {pair.name}, {pair.dtype}, weights {pair.weights}, {flags.context} tokens of context\n")
    pin_cpus(cpu_share(config, 0))
    parallel, _ = load_parallel(config, say=console.progress)
    try:
        one = load_runner(config, largest=largest_step(config), say=console.progress)
        measured = {rows: _measured([one, parallel], rows, flags) for rows in flags.rows}
    finally:
        parallel.close()
    print("sequences  processes   ms/step   tokens/s   speed-up")
    for rows, arms in measured.items():
        alone, together = map(statistics.median, arms)
        for processes, seconds in ((1, alone), (flags.ranks, together)):
            print(f"{rows:9}{processes:11}{seconds * 1e3:10.2f}{rows / seconds:11.1f}{alone / seconds:11.2f}")
    return 0


def _flags() -> argparse.Namespace:
    parser = console.new_parser(__doc__)
    pairs.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences of a step")
    parser.add_argument("--context", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=32, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=6, help="of each arm, in turn")
    return parser.parse_args()


def _config(flags: argparse.Namespace, pair: pairs.Pair, cores: Sequence[int]) -> VerifyConfig:
    length = flags.context + WARM_UP + flags.steps * flags.rounds
    return VerifyConfig(
        model=str(Path(pair.target)),
        dtype=pair.dtype,
        weights=pair.weights,
        device="cpu",
        cpus=",".join(map(str, cores)),
        tensor_parallel=flags.ranks,
        kv_tokens=max(flags.rows) * -(-length // PAGE_SIZE) * PAGE_SIZE,
        prefix_cache=False,
    )


def _measured(runners: Sequence[ModelRunner], rows: int, flags: argparse.Namespace) -> list[list[float]]:
    """Seconds of the steps of each runner, in turn."""
    arms = [_Arm(runner, rows, flags.context) for runner in runners]
    for arm in arms:
        arm.run(WARM_UP)
    steps: list[list[float]] = [[] for _ in arms]
    for _ in range(flags.rounds):
        for arm, found in zip(arms, steps, strict=True):
            found += arm.run(flags.steps)
    for arm in arms:
        arm.release()
    return steps


class _Arm:
    """Some sequences that a runner decodes greedily."""

    def __init__(self, runner: ModelRunner, rows: int, context: int) -> None:
        self._runner = runner
        self._sequences = [SequenceKv.open(runner.pool, []) for _ in range(rows)]
        size = runner.loaded.vocabulary_size
        prompts = [[(7 * row + 13 * place) % size for place in range(context)] for row in range(rows)]
        for kv, prompt in zip(self._sequences, prompts, strict=True):
            runner.forward([Segment(kv, prompt, None, [])])
            runner.commit(kv, range(context), prompt)
        self._next = [prompt[0] for prompt in prompts]

    def run(self, count: int) -> list[float]:
        """Run `count` steps; returns the seconds of each."""
        times = [time.monotonic()]
        for _ in range(count):
            segments = [
                Segment(kv, [token], None, [0]) for kv, token in zip(self._sequences, self._next, strict=True)
            ]
            logits = self._runner.forward(segments)
            for kv, token in zip(self._sequences, self._next, strict=True):
                self._runner.commit(kv, [0], [token])
            self._next = logits.argmax(-1).tolist()
            times.append(time.monotonic())
        return [after - before for before, after in pairwise(times)]

    def release(self) -> None:
        """Give the pages back."""
        for kv in self._sequences:
            kv.release()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console.run(main)
