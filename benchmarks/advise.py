"""Compares predictions of `outrider advise` with real services, on a quiet machine with two cores.

    python -m benchmarks.advise
    python -m benchmarks.advise --pairs wide --temperatures 0.7 --sessions 1 8 32

For each pair and temperature the target and every draft are measured, and `outrider up` is started with each
of them by the command that `advise` prints. The same prompts with the same seeds are asked of it as are
simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import machine
from benchmarks.flags import command as own_command
from benchmarks.pairs import PAIRS, Pair
from benchmarks.workload import PROMPTS, SEPARATOR
from outrider.cli.advise.loads import load_of, simulate_load
from outrider.cli.advise.measuring import MeasuredOption, TargetOnThisMachine, Traffic
from outrider.cli.advise.options import DraftOption, Room, command
from outrider.cli.prompt_ids import token_ids_of
from outrider.cli.up.plan import LOOKUP
from outrider.client import NEVER, AsyncClient
from scripts.child import Child
from scripts.console import new_parser, run
from scripts.local_services import START_SECONDS
from simulator.topology import Load
from simulator.traces import Trace

DTYPE: Final = "bfloat16"
MAX_PROMPT = 128
"""Most tokens of a prompt; the rest is cut off."""
TOLERANCE = 0.15
"""Largest error of a good prediction."""
TURNS = 3
"""How often each load runs on the real services; the median counts."""
HEADING = f"{'pair':6}{'T':>4}{'sess.':>6}  {'draft':34}{'predicted':>10}{'measured':>10}{'error':>7}  length"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load with one draft."""

    label: str
    predicted: float
    measured: float
    """Tokens per second."""
    lengths: tuple[float, float]
    """Tokens per step, predicted and measured."""

    @property
    def error(self) -> float:
        """The error of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1.0

    def __str__(self) -> str:
        lengths = " ".join(f"{length:.2f}" for length in self.lengths)
        return f"{self.label}{self.predicted:10.1f}{self.measured:10.1f}{self.error:+7.0%}  {lengths}"


def main() -> int:
    """Measure, predict, serve and compare."""
    flags = parse()
    flags.folder.mkdir(parents=True, exist_ok=True)
    print(machine.lines(machine.describe() | {"command": own_command("advise")}))
    print(HEADING)
    found: list[Comparison] = []
    for pair in flags.pairs:
        for temperature in flags.temperatures:
            for comparison in compare(Pair(pair, *PAIRS[pair](), DTYPE), temperature, flags):
                print(comparison, flush=True)
                found.append(comparison)
    print(verdict(found))
    return 0


def compare(pair: Pair, temperature: float, flags: argparse.Namespace) -> Iterator[Comparison]:
    """Predict and measure every draft under every load."""
    prompts = token_ids_of(PROMPTS.read_text().split(SEPARATOR), str(pair.target))
    traffic = Traffic([prompt[:MAX_PROMPT] for prompt in prompts], flags.tokens, temperature)
    target = TargetOnThisMachine(str(pair.target), pair.dtype, traffic)
    measured = [target.without(), *(target.measure(option) for option in options_of(pair, flags))]
    texts = [Trace(text.prompt, text.tokens, text.params.seed, ()) for text in target.texts]
    del target  # its memory and its cores are for the services
    loads = [load_of(sessions, len(prompts), flags.tokens, temperature) for sessions in flags.sessions]
    room = Room(max(flags.sessions), traffic.longest)
    for number, one in enumerate(measured):
        line = command(str(pair.target), one.option, pair.dtype, room)
        log = flags.folder / f"{pair.name}-{temperature:g}-{number}.log"
        with serving(line, log) as endpoint:
            for load in loads:
                yield _compare(_label(pair, one, load), one, load, endpoint, texts)


def options_of(pair: Pair, flags: argparse.Namespace) -> list[DraftOption]:
    """The drafts that are compared: a small model, a lookup, and the target without some layers."""
    skipped = DraftOption(str(pair.target), flags.skip_layers)
    return [DraftOption(str(pair.draft)), DraftOption(LOOKUP), skipped]


@contextmanager
def serving(line: str, log: Path) -> Iterator[str]:
    """Run `outrider up` by a command line, on free ports and without a prefix cache; yields its endpoint."""
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words[: words.index("outrider")])
    arguments = words[words.index("outrider") + 1 :]
    uncached = {"OUTRIDER_VERIFY_PREFIX_CACHE": "false", "OUTRIDER_DRAFT_PREFIX_CACHE": "false"}
    program = [sys.executable, "-m", "outrider", *arguments, "--port", "0", "--http-port", "-1"]
    with Child(program, log, environment={**os.environ, **uncached, **settings}) as up:
        yield str(up.receive(START_SECONDS)["endpoint"])


def _compare(
    label: str, one: MeasuredOption, load: Load, endpoint: str, texts: Sequence[Trace]
) -> Comparison:
    turns = [asyncio.run(serve(endpoint, load, texts)) for _ in range(TURNS)]
    speed, length = (median(turn[column] for turn in turns) for column in (0, 1))
    predicted = simulate_load(one, load)
    return Comparison(label, predicted.tokens_per_second, speed, (predicted.acceptance_length, length))


async def serve(endpoint: str, load: Load, texts: Sequence[Trace]) -> tuple[float, float]:
    """Tokens per second and per step of the real services under a load of these prompts and seeds."""
    async with AsyncClient(endpoint, retries=NEVER) as client:
        session = _Session(client, load, cycle(texts))
        await session.repeat(load.warm_up)
        await asyncio.gather(*(session.repeat(load.warm_rounds) for _ in range(load.sessions)))
        session.tokens = session.steps = 0
        start = time.perf_counter()
        await asyncio.gather(*(session.repeat(load.rounds) for _ in range(load.sessions)))
        return session.tokens / (time.perf_counter() - start), session.tokens / session.steps


@dataclass(slots=True)
class _Session:
    """Sends the prompts one after the other, as the simulated clients do; several may at once."""

    client: AsyncClient
    load: Load
    texts: Iterator[Trace]
    """The next text that is asked for, by whoever asks."""
    tokens: int = 0
    steps: int = 0

    async def repeat(self, rounds: int) -> None:
        """Send `rounds` requests one after the other."""
        for _ in range(rounds):
            text = next(self.texts)
            result = await self.client.generate(
                text.prompt,
                max_tokens=min(self.load.new_tokens, len(text.tokens)),
                temperature=self.load.temperature,
                seed=text.seed,
                ignore_eos=True,
            )
            self.tokens += len(result.token_ids)
            self.steps += int(result.generations[0].end.speculation["steps"])


def verdict(found: Sequence[Comparison]) -> str:
    """A sentence about how many predictions are good enough."""
    good = sum(abs(comparison.error) <= TOLERANCE for comparison in found)
    worst = max(found, key=lambda comparison: abs(comparison.error))
    return f"{good} of {len(found)} within {TOLERANCE:.0%}; worst:\n{worst}"


def _label(pair: Pair, one: MeasuredOption, load: Load) -> str:
    short = one.option.name.replace(str(pair.target), "target").replace(str(pair.draft), "small model")
    return f"{pair.name:6}{load.temperature:4g}{load.sessions:6}  {short:34}"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--pairs", nargs="+", default=["demo", "wide"], choices=PAIRS)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    add("--sessions", type=int, nargs="+", default=[1, 8, 32])
    add("--tokens", type=int, default=96, help="new tokens of each request")
    add("--skip-layers", default="2-5", help="layers that the target does without")
    add("--folder", type=Path, default=Path("out/advise"), help="for the services' logs")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
