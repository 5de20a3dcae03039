"""Compares the simulation with the real thing: `python -m simulator validate`.

Real services, one core per model, serve the recorded prompts with the recorded seeds; the simulation is fed
with times that are measured right before, in the same minutes on the same machine. The machine must be quiet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

from outrider.client import NEVER, AsyncClient
from outrider.client.request import Mode
from scripts.local_services import DRAFT, TARGET, Deployment, LocalServices, widened_target
from simulator.measure import measure
from simulator.profile import FOLDER, Profile
from simulator.report import Report
from simulator.simulate import simulate
from simulator.topology import ArmKind, Load, Topology
from simulator.traces import Trace, load_corpus

MODES: dict[ArmKind, Mode] = {ArmKind.OFF: "off", ArmKind.SEQUENTIAL: "sequential", ArmKind.AUTO: "auto"}
TRACES = "demo_pair.json"
DTYPE = "bfloat16"
TOLERANCE = 0.1
TURNS = 3
"""Of the real services with every load, modes in turn; the medians count."""


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """What is compared."""

    pairs: Sequence[str]
    temperatures: Sequence[float]
    sessions: Sequence[int]
    new_tokens: int
    folder: Path
    """For the services' logs and the measured profiles."""

    def loads(self) -> Iterator[Load]:
        """The loads, few sessions with several requests each."""
        for temperature in self.temperatures:
            for sessions in self.sessions:
                yield Load(
                    sessions=sessions,
                    rounds=max(1, 6 // sessions),
                    prompt_tokens=0,
                    new_tokens=self.new_tokens,
                    warm_up=2,
                    temperature=temperature,
                )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load in one mode."""

    pair: str
    load: Load
    arm: ArmKind
    predicted: Report
    measured: float
    """Tokens per second."""
    measured_length: float
    """Tokens per step."""

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to what was measured."""
        return self.predicted.tokens_per_second / self.measured - 1.0


def validate(plan: ValidationPlan) -> list[Comparison]:
    """Measure, serve and simulate each pair; prints every comparison as it comes."""
    print(f"{'pair':9}{'T':>4}{'sess.':>6} {'mode':11}{'predicted':>10}{'measured':>10}{'error':>7}  length")
    found: list[Comparison] = []
    for pair in plan.pairs:
        target = widened_target() if pair == "widened" else TARGET
        profile = measure(target, DRAFT, DTYPE, TRACES, load_corpus(FOLDER / TRACES, 0.0).traces)
        (plan.folder / f"{pair}.json").write_text(profile.model_dump_json(indent=1) + "\n")
        for comparison in _compare(pair, target, profile, plan):
            print(line(comparison), flush=True)
            found.append(comparison)
    return found


def line(c: Comparison) -> str:
    """One line of the table."""
    return (
        f"{c.pair:9}{c.load.temperature:4}{c.load.sessions:6} {c.arm:11}"
        f"{c.predicted.tokens_per_second:10.1f}{c.measured:10.1f}{c.error:+7.0%}"
        f"  {c.predicted.acceptance_length:.2f} {c.measured_length:.2f}"
    )


def verdict(found: Sequence[Comparison]) -> str:
    """How many predictions are good enough."""
    good = sum(abs(comparison.error) <= TOLERANCE for comparison in found)
    worst = max(found, key=lambda comparison: abs(comparison.error))
    return f"{good} of {len(found)} within {TOLERANCE:.0%}; worst:\n{line(worst)}"


def _compare(pair: str, target: Path, profile: Profile, plan: ValidationPlan) -> Iterator[Comparison]:
    layout = Deployment(
        target=target,
        drafts={"demo": DRAFT},
        dtype=DTYPE,
        folder=plan.folder,
        verify_cpus="0",
        draft_cpus="1",
        prefix_cache=False,
    )
    with ExitStack() as stack:
        endpoint = LocalServices(layout, stack).endpoint("demo")
        for load in plan.loads():
            texts = load_corpus(FOLDER / TRACES, load.temperature).traces
            turns = [
                {arm: asyncio.run(serve(endpoint, arm, load, texts)) for arm in MODES} for _ in range(TURNS)
            ]
            for arm in MODES:
                speed, length = (median(turn[arm][column] for turn in turns) for column in (0, 1))
                predicted = simulate(profile, Topology(arm=arm), load)
                yield Comparison(pair, load, arm, predicted, speed, length)


async def serve(endpoint: str, arm: ArmKind, load: Load, texts: Sequence[Trace]) -> tuple[float, float]:
    """Tokens per second and per step of the real services under a load of these prompts and seeds."""
    async with AsyncClient(endpoint, retries=NEVER) as client:
        session = _Session(client, MODES[arm], load, cycle(texts))
        await session.repeat(load.warm_up)
        await asyncio.gather(*(session.repeat(load.warm_rounds) for _ in range(load.sessions)))
        session.tokens = session.steps = 0
        start = time.perf_counter()
        await asyncio.gather(*(session.repeat(load.rounds) for _ in range(load.sessions)))
        return session.tokens / (time.perf_counter() - start), session.tokens / session.steps


@dataclass(slots=True)
class _Session:
    """Sends the recorded prompts one after the other, as the simulated clients do; several may at once."""

    client: AsyncClient
    mode: Mode
    load: Load
    texts: Iterator[Trace]
    """The next text that is asked for, by whoever asks."""
    tokens: int = 0
    steps: int = 0

    async def repeat(self, rounds: int) -> None:
        """So many requests one after the other."""
        for _ in range(rounds):
            text = next(self.texts)
            result = await self.client.generate(
                text.prompt,
                mode=self.mode,
                max_tokens=min(self.load.new_tokens, len(text.tokens)),
                temperature=self.load.temperature,
                seed=text.seed,
                ignore_eos=True,
            )
            self.tokens += len(result.token_ids)
            self.steps += int(result.generations[0].end.speculation["steps"])
