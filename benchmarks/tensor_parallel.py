"""One process of one core against several of one core each: tokens/s, and where the time of a step goes.

    python -m benchmarks.tensor_parallel
    python -m benchmarks.tensor_parallel --pair demo --steps 20 --rounds 2     # a trial of the benchmark

A step decodes one token of each sequence. Both arms are loaded at once and run in turn, rank 0 on the first
core and the others on the next ones; while one arm runs, the other sleeps. Of rank 0's time in a step

    computing        lies between the exchanges
    waiting          from where it comes to an exchange until the last rank does
    communication    from there until it has what it needs

The median step is shown. Without services: `benchmarks.compare` measures end to end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import machine, pairs
from benchmarks.flags import new_parser
from outrider.config import VerifyConfig
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loading.replica import largest_step, load_runner
from outrider.engine.parallel.leader import load_parallel
from outrider.engine.parallel.order import cpu_share
from outrider.engine.runner import ModelRunner, Segment
from outrider.process import pin_cpus
from scripts import console

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step of rank 0."""

    computing: float
    waiting: float
    communication: float


@dataclass(frozen=True, slots=True)
class Step:
    """When a step began and ended, by the machine's monotonic clock."""

    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


def main() -> int:
    """Measure and print."""
    flags = _flags()
    cores = machine.cores()[: flags.ranks]
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
    parallel = load_parallel(config, say=console.progress, timed=True)
    try:
        one = load_runner(config, largest=largest_step(config), say=console.progress)
        measured = {rows: _measured([one, parallel.runner], rows, flags) for rows in flags.rows}
        times = parallel.group.exchange_times()
    finally:
        parallel.runner.close()
    for line in report(measured, times, flags.ranks):
        print(line)
    return 0


def report(measured: dict[int, list[list[Step]]], times: Sequence[Sequence[float]], ranks: int) -> list[str]:
    """A table of the arms, by sequences of a step; `times` are those of the exchanges by rank."""
    lines = ["sequences  processes   ms/step   tokens/s   speed-up   computing   waiting   communication"]
    for rows, (one, several) in measured.items():
        alone, together = (statistics.median(step.seconds for step in arm) for arm in (one, several))
        lines.append(f"{rows:9}{1:11}{alone * 1e3:10.2f}{rows / alone:11.1f}{1:11.2f}")
        found = [parts_of(step, times) for step in several]
        shares = "".join(
            f"{statistics.median(getattr(parts, name) for parts in found) * 1e3:{width}.2f}"
            for name, width in (("computing", 12), ("waiting", 10), ("communication", 16))
        )
        speed = f"{together * 1e3:10.2f}{rows / together:11.1f}{alone / together:11.2f}"
        lines.append(f"{rows:9}{ranks:11}{speed}{shares}")
    return lines


def parts_of(step: Step, times: Sequence[Sequence[float]]) -> Parts:
    """Where rank 0's time went in a step: `times` [ranks][2 * exchanges], where each began and ended."""
    waiting = communication = 0.0
    for i in range(0, len(times[0]), 2):
        begun, ended = times[0][i], times[0][i + 1]
        if begun < step.begun or ended > step.ended:
            continue
        last = min(max(max(rank[i] for rank in times), begun), ended)
        waiting += last - begun
        communication += ended - last
    return Parts(step.seconds - waiting - communication, waiting, communication)


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__)
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


def _measured(runners: Sequence[ModelRunner], rows: int, flags: argparse.Namespace) -> list[list[Step]]:
    """The steps of each runner, in turn."""
    arms = [_Arm(runner, rows, flags.context) for runner in runners]
    for arm in arms:
        arm.run(WARM_UP)
    steps: list[list[Step]] = [[] for _ in arms]
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
        self._sequences = [SequenceKv.open(runner.pool, [], reuse=False) for _ in range(rows)]
        size = runner.loaded.vocabulary_size
        prompts = [[(7 * row + 13 * place) % size for place in range(context)] for row in range(rows)]
        for kv, prompt in zip(self._sequences, prompts, strict=True):
            runner.forward([Segment(kv, prompt, None, [])])
            runner.commit(kv, range(context), prompt)
        self._next = [prompt[0] for prompt in prompts]

    def run(self, count: int) -> list[Step]:
        """So many steps."""
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
        return [Step(*ends) for ends in pairwise(times)]

    def release(self) -> None:
        """Give the pages back."""
        for kv in self._sequences:
            kv.release()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console.run(main)
