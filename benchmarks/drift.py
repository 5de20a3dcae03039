"""How soon is a fall of acceptance noticed, and how often is one reported that was none?

    python -m benchmarks.drift                  simulated streams
    python -m benchmarks.drift --live           code prompts turning into prose, against the demo pair

Simulated: outcomes are independent; false alarms are counted per 10,000 steps of a steady stream, delays in
steps from the beginning of the fall to the first alarm after it, over runs that begin with `BEFORE` steady
steps. Live: the services' own detector, read from the orchestrator's Prometheus page after every request;
its steps are those with nodes of a draft. The target is widened, as the small one is too fast for its draft
to say much in requests this short.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, quantiles
from urllib.request import urlopen

import grpc
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.observing.drift import PageHinkley
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2
from scripts.child import ROOT, Child
from scripts.local_services import DRAFT, widened_target

BEFORE = 2_000
STEADY = 20_000
PATIENCE = 4_000
"""Steps after which a fall counts as missed."""
RATES = (0.3, 0.5, 0.7, 0.9)
MODULES = "argparse configparser csv difflib gettext optparse pprint shlex smtplib tarfile textwrap"
PROSE = ("LICENSE", "README.md", "docs/architecture.md", "docs/exactness.md", "docs/calling.md")
PROMPT_CHARACTERS = 200
REQUEST_TOKENS = 16
"""Few, for the small models fall back into code after a line of prose."""

Rate = Callable[[int], float]
"""Acceptance at a step, counted from the beginning of the fall."""
FALLS: dict[str, Rate] = {
    "0.7 to 0.5": lambda step: 0.5,
    "0.7 to 0.6": lambda step: 0.6,
    "0.7 to 0.65": lambda step: 0.65,
    "0.7 to 0.5 within 2,000 steps": lambda step: 0.7 - 0.2 * min(step / 2_000, 1.0),
    "0.9 to 0.8": lambda step: 0.8,
}


def false_alarms(rate: float, runs: int, random: Random) -> float:
    """Alarms per 10,000 steps of steady streams."""
    alarms = 0
    for _ in range(runs):
        detector = PageHinkley()
        alarms += sum(detector.observe(random.random() < rate).alarm for _ in range(STEADY))
    return alarms * 10_000 / (runs * STEADY)


def delays(before: float, fall: Rate, runs: int, random: Random) -> list[float]:
    """Steps to the first alarm after the fall; infinite where there was none in time."""
    return [_delay(before, fall, random) for _ in range(runs)]


def _delay(before: float, fall: Rate, random: Random) -> float:
    detector = PageHinkley()
    for _ in range(BEFORE):
        detector.observe(random.random() < before)
    for step in range(PATIENCE):
        if detector.observe(random.random() < fall(step)).alarm:
            return step + 1
    return float("inf")


def simulate(runs: int) -> None:
    """Print both tables."""
    random = Random(1)
    print(f"{'steady acceptance':32}{'false alarms per 10,000 steps':>30}")
    for rate in RATES:
        print(f"{rate:<32}{false_alarms(rate, runs, random):>30.3f}")
    print(f"\n{'fall':32}{'median steps':>14}{'95 % within':>14}{'missed':>10}")
    for name, fall in FALLS.items():
        found = delays(float(name[:3]), fall, runs, random)
        missed = sum(delay == float("inf") for delay in found) / runs
        print(f"{name:32}{median(found):>14.0f}{quantiles(found, n=20)[-1]:>14.0f}{missed:>10.1%}")


@dataclass(frozen=True, slots=True)
class Counts:
    """What the orchestrator has counted so far."""

    steps: float
    """With nodes of a draft."""
    verified: float
    """Steps with candidates of any kind."""
    accepted: float
    """Those of them that accepted one."""
    alarms: float

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.steps - other.steps,
            self.verified - other.verified,
            self.accepted - other.accepted,
            self.alarms - other.alarms,
        )

    def __str__(self) -> str:
        share = self.accepted / self.verified
        return f"{self.steps:.0f} steps with drafts, {share:.3f} accepted, {self.alarms:.0f} alarms"


class Live:
    """The demo pair behind `outrider up`, and the page of its orchestrator."""

    def __init__(self, ready: dict[str, str], temperature: float) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(ready["endpoint"]))
        self._metrics = ready["metrics"]
        self._temperature = temperature

    def request(self, prompt: str, seed: int) -> Counts:
        """Generate, then read the page."""
        sampling = tokens_pb2.SamplingParams(
            max_tokens=REQUEST_TOKENS, temperature=self._temperature, seed=seed, ignore_eos=True
        )
        for _ in self._stub.Generate(
            generation_pb2.GenerateRequest(text=prompt, sampling=sampling, task="mixed")
        ):
            pass
        return self._counts()

    def _counts(self) -> Counts:
        with urlopen(self._metrics, timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        samples = [sample for family in families for sample in family.samples]

        def total(name: str, **labels: str) -> float:
            full = f"outrider_orchestrator_{name}_total"
            found = (s for s in samples if s.name == full and labels.items() <= s.labels.items())
            return sum(sample.value for sample in found)

        steps = total("steps") - total("undrafted_steps")
        verified = total("position_verified", position="1")
        return Counts(steps, verified, total("position_accepted", position="1"), total("drifts"))


def windows(files: list[Path], random: Random) -> Iterator[str]:
    """Pieces of text from anywhere in some files."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    while True:
        start = random.randrange(len(text) - PROMPT_CHARACTERS)
        yield text[start : start + PROMPT_CHARACTERS]


def live(requests: int, temperature: float) -> None:
    """Code for so many requests, then prose until the alarm, or for as many."""
    code = windows([Path(sysconfig.get_paths()["stdlib"]) / f"{m}.py" for m in MODULES.split()], Random(1))
    prose = windows([ROOT / name for name in PROSE], Random(2))
    models = ["--target", str(widened_target()), "--draft", str(DRAFT), "--dtype", "bfloat16"]
    command = [sys.executable, "-m", "outrider", "up", *models, "--port", "0", "--metrics-port", "0"]
    (ROOT / "out").mkdir(exist_ok=True)
    with Child(command, ROOT / "out/drift.log") as up:
        pair = Live(up.receive(), temperature)
        for seed in range(requests):
            before = pair.request(next(code), seed)
        for count in range(1, requests + 1):
            after = pair.request(next(prose), count)
            if after.alarms > before.alarms:
                break
    print(f"T = {temperature:g}\ncode   {before}\nprose  {after - before}, in {count} requests")


def main() -> None:
    """Simulate, or measure on live services."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="simulated streams per row")
    parser.add_argument("--live", action="store_true", help="measure on the demo pair instead")
    parser.add_argument("--requests", type=int, default=300, help="live requests of each kind")
    parser.add_argument("--temperature", type=float, default=0.0, help="of live requests")
    flags = parser.parse_args()
    if flags.live:
        live(flags.requests, flags.temperature)
    else:
        simulate(flags.runs)


if __name__ == "__main__":
    main()
