"""Compares drafts of every kind on one pair: memory, acceptance, step time, tokens per second.

    python -m benchmarks.drafts_table --pair demo
    python -m benchmarks.drafts_table --pair demo --head models/demo/eagle
    python -m benchmarks.drafts_table --pair wide --skip-layers 2-5

One verify replica serves all; each kind has an orchestrator and draft replicas of its own, on one core, of
which one kind works at a time: they take turns prompt by prompt. Memory is that of the draft processes, torch
included. Acceptance is the share of verified nodes that the target took, length the tokens per step. Lookup
on the verify side is off.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine, pairs, workload
from benchmarks.answers import Answers
from benchmarks.flags import command
from benchmarks.pairs import Pair, load_pair
from benchmarks.workload import SEED, Tokens, load_workload
from outrider.client import Client
from outrider.cores import allowed_cores
from scripts.console import new_parser, progress, run
from scripts.local_services import metric, serve, wait_for_drafts

OFF = "none"
HEADING = f"\n{'kind':36}   T  memory MB  draft step ms  acceptance  length  tokens/s   ÷ none"

Drafts = tuple[tuple[str, ...], ...]
"""Flags of each draft replica of a kind."""


@dataclass(slots=True)
class Kind:
    """The services of one kind."""

    name: str
    client: Client
    pages: list[str]
    """Metrics pages of its draft replicas."""
    answers: Answers = field(default_factory=Answers)
    """The answers at the present temperature."""
    worked: tuple[float, float] = (0.0, 0.0)
    """Seconds and number of draft steps before the present temperature."""

    def begin(self) -> None:
        """Begin a new temperature."""
        self.answers, self.worked = Answers(), self.steps()

    def ask(self, prompt: Tokens, tokens: int, temperature: float) -> None:
        """Ask for one answer."""
        result = self.client.generate(
            prompt,
            mode="off" if self.name == OFF else "auto",
            temperature=temperature,
            seed=SEED,
            max_tokens=tokens,
            ignore_eos=True,
            task=self.name,
        )
        self.answers.add(result)

    def steps(self) -> tuple[float, float]:
        """Seconds and number of draft steps so far."""
        return self._sum("outrider_draft_step_seconds_sum"), self._sum("outrider_draft_step_seconds_count")

    def line(self, temperature: float, alone: float) -> str:
        """One row of the table; `alone` are the tokens per second without drafts."""
        seconds, steps = (now - before for now, before in zip(self.steps(), self.worked, strict=True))
        answers, memory = self.answers, self._sum("process_resident_memory_bytes") / 1e6
        return (
            f"{self.name:36}{temperature:4g}{memory:11.0f}{1e3 * seconds / max(steps, 1):15.2f}"
            f"{answers.sum('accepted') / max(answers.sum('verified'), 1):12.2f}{answers.length:8.2f}"
            f"{answers.rate:10.1f}{answers.rate / alone:9.2f}"
        )

    def _sum(self, name: str) -> float:
        return sum(metric(page, name) for page in self.pages)


def kinds_of(pair: Pair, skip_layers: str, head: str, mtp: bool) -> dict[str, Drafts]:
    """Flags of the draft replicas of every kind; an EAGLE head is one where its folder is given, and the
    target's MTP layer with `mtp`."""
    eagle = ("--kind", "eagle", "--model", head, "--target", str(pair.target))
    small, target = ("--model", str(pair.draft)), ("--model", str(pair.target))
    lookup = ("--kind", "lookup", "--tokenizer", str(pair.target))
    skipped = (*target, "--skip-layers", skip_layers)
    heads: dict[str, Drafts] = {"EAGLE-3 head": (eagle,)} if head else {}
    heads |= {"MTP layer": (("--kind", "mtp", *target),)} if mtp else {}
    return {
        OFF: (),
        "lookup": (lookup,),
        "small model": (small,),
        f"target without {skip_layers}": (skipped,),
        "target, int8": ((*target, "--weights", "int8"),),
        "small model + lookup": (small, lookup),
    } | heads


def main() -> int:
    """Measure and print."""
    flags = parse()
    pair = load_pair(flags)
    work = load_workload(flags, pair.target)
    prompts = work.prompts[: flags.requests]
    print(machine.lines(machine.describe() | {"command": command("drafts_table")}))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services = Services(pair, flags, Path(folder), stack)
        kinds = [
            services.kind(name, drafts)
            for name, drafts in kinds_of(pair, flags.skip_layers, flags.head, flags.mtp).items()
        ]
        for temperature in flags.temperatures:
            measure(kinds, prompts, work.tokens, temperature)
            alone = next(kind.answers.rate for kind in kinds if kind.name == OFF)
            print(HEADING)
            for kind in kinds:
                print(kind.line(temperature, alone), flush=True)
    return 0


def measure(kinds: Sequence[Kind], prompts: Sequence[Tokens], tokens: int, temperature: float) -> None:
    """Run all kinds in turn on one prompt after the other; the first prompt, run once before, warms up."""
    for kind in kinds:
        kind.ask(prompts[0], tokens, temperature)
        kind.begin()
    for index, prompt in enumerate(prompts):
        progress(f"T = {temperature:g}, prompt {index + 1} of {len(prompts)}")
        for kind in kinds:
            kind.ask(prompt, tokens, temperature)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    workload.add_flags(parser)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--requests", type=int, default=12, help="prompts of each kind of draft")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each service")
    parser.add_argument("--skip-layers", default="2-5", help="layers that the target does without")
    parser.add_argument("--head", default="", help="folder of an EAGLE-3 head for the target")
    parser.add_argument("--mtp", action="store_true", help="the target's MTP layer too")
    return parser.parse_args()


class Services:
    """One verify replica, and what each kind needs beside it, until the stack unwinds."""

    def __init__(self, pair: Pair, flags: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._cores = allowed_cores()
        self._common = ("--dtype", pair.dtype, "--device", "cpu", "--threads", str(flags.threads))
        model = ("--model", str(pair.target), "--weights", pair.weights, *self._common, "--no-prefix-cache")
        self._verify = self._start("verify", "verify", 0, *model, "--no-lookup")["endpoint"]

    def kind(self, name: str, drafts: Drafts) -> Kind:
        """Start the draft replicas and the orchestrator of a kind."""
        progress(f"starting: {name}")
        ready = [self._start("draft", name, 1, *flags, *self._common) for flags in drafts]
        flags = ["--verify", self._verify, "--drafts-per-session", str(max(len(drafts), 1))]
        flags += [word for one in ready for word in ("--draft", one["endpoint"])]
        endpoint = self._start("orchestrator", name, 1, *flags)["endpoint"]
        wait_for_drafts(endpoint, len(drafts))
        client = self._stack.enter_context(Client(endpoint, timeout=600))
        return Kind(name, client, [one["metrics"] for one in ready])

    def _start(self, service: str, name: str, core: int, *flags: str) -> dict[str, str]:
        """The ready line of a process, which ends with the stack."""
        pinned = ["--cpus", str(self._cores[core])] if len(self._cores) > 1 else []
        name = f"{service} {name.replace('/', ' ')}"
        return serve(self._stack, self._folder, service, name, *pinned, *flags).receive()


if __name__ == "__main__":
    run(main)
