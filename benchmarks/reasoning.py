"""Long chains: tokens per step by phase of the text, with lookup, a small model, and both.

    python -m benchmarks.reasoning --pair demo --tokens 800

A chain of thought is long and comes back to what it said before. No model here reasons, so the chains are
long continuations of the target. Each is divided into phases of as many tokens: what an arm gains from one
phase to the next, it gains from the text so far. Every text has to be that of MODE_OFF.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.drafts_table import OFF, Kind, Services, kinds_of, service_parser
from benchmarks.flags import command
from benchmarks.pairs import load_pair
from benchmarks.workload import SEED, Tokens, load_workload
from outrider.client import Chunk, Complete
from scripts.console import progress, run

ARMS = (OFF, "lookup", "small model", "small model + lookup")


@dataclass(slots=True)
class Chains:
    """The chains of one arm at one temperature."""

    phases: int
    steps: list[int] = field(init=False)
    """Steps that ended in each phase."""
    tokens: int = 0
    seconds: float = 0.0
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = [0] * self.phases

    def ask(self, kind: Kind, prompt: Tokens, length: int, temperature: float) -> None:
        """One more chain of so many tokens."""
        text: list[int] = []
        for event in kind.client.stream(
            prompt,
            mode="off" if kind.name == OFF else "auto",
            temperature=temperature,
            seed=SEED,
            max_tokens=length,
            ignore_eos=True,
            record_steps=True,
        ):
            match event:
                case Chunk(token_ids=tokens, step=step):
                    text += tokens
                    if step is not None:
                        self.steps[min((len(text) - 1) * self.phases // length, self.phases - 1)] += 1
                case Complete(speculation=counts):
                    self.seconds += counts["decode_micros"] * 1e-6
                case _:
                    pass
        self.tokens += len(text)
        self.texts.append(tuple(text))

    def line(self, name: str, temperature: float, alone: Chains) -> str:
        """One row of the table."""
        share = self.tokens / self.phases
        phases = "".join(f"{share / max(steps, 1):8.2f}" for steps in self.steps)
        rate, base = (each.tokens / each.seconds for each in (self, alone))
        same = sum(ours == theirs for ours, theirs in zip(self.texts, alone.texts, strict=True))
        return f"{name:22}{temperature:4g}{phases}{rate:11.1f}{rate / base:9.2f}{same:8} of {len(self.texts)}"


def main() -> int:
    """Measure and print; exit status 1 when a text is not that of MODE_OFF."""
    flags = parse()
    pair = load_pair(flags)
    prompts = load_workload(flags, pair.target).prompts[: flags.requests]
    print(machine.lines(machine.describe() | {"command": command("reasoning")}))
    equal = True
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services = Services(pair, flags, Path(folder), stack)
        known = kinds_of(pair, "")
        kinds = [services.kind(name, known[name]) for name in ARMS]
        for temperature in flags.temperatures:
            found = measure(kinds, prompts, flags, temperature)
            phases = "".join(f"{f'phase {phase + 1}':>8}" for phase in range(flags.phases))
            print(f"\n{'tokens per step':22}   T{phases}   tokens/s   ÷ none   equal")
            for name, chains in found.items():
                print(chains.line(name, temperature, found[OFF]), flush=True)
                equal = equal and chains.texts == found[OFF].texts
    return 0 if equal else 1


def measure(
    kinds: Sequence[Kind], prompts: Sequence[Tokens], flags: argparse.Namespace, temperature: float
) -> dict[str, Chains]:
    """All arms in turn on one prompt after the other."""
    found = {kind.name: Chains(flags.phases) for kind in kinds}
    for index, prompt in enumerate(prompts):
        progress(f"T = {temperature:g}, chain {index + 1} of {len(prompts)}")
        for kind in kinds:
            found[kind.name].ask(kind, prompt, flags.tokens, temperature)
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = service_parser(__doc__, requests=8)
    parser.add_argument("--phases", type=int, default=4, help="phases that a chain is divided into")
    parser.set_defaults(lookup=False)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
