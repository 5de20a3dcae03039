"""Long prompts: do they stall running sessions, are they reused, and does the draft prefill meanwhile?

python -m benchmarks.prefill

stall    time between deliveries of running sessions, alone and while a long prompt prefills
reuse    time to the first token of a long prompt, and of the same prompt again
overlap  how long before the target's first token the draft's first candidates were there
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import machine, pairs
from benchmarks.arms.own import Client, message
from benchmarks.flags import command, json_file, new_parser
from benchmarks.layout import layout_of
from benchmarks.pairs import load_pair
from benchmarks.samples import SampledRequest, Spread, percentile
from benchmarks.workload import PROMPTS, SEPARATOR, Tokens
from scripts.child import ROOT
from scripts.console import progress, run
from scripts.local_services import fleet

MODES = ("off", "auto")
SHORT = 64
"""Tokens of the running sessions' prompts."""
ANSWER = 8
"""Tokens that a long prompt is continued with."""


def main() -> int:
    """Measure, print and write."""
    flags = parse()
    pair = load_pair(flags)
    prompts = Prompts(pair.target, flags.long)
    progress("starting the services")
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        fleet(layout_of(flags, pair, {"demo": pair.draft}, prefix_cache=True)) as services,
    ):
        client = Client(services, runner)
        bench = Prefill(client, prompts, flags)
        bench.warm_up()
        stalls = [bench.stall(mode) for _ in range(flags.rounds) for mode in MODES]
        reuses = [bench.reuse() for _ in range(flags.rounds)]
    about = machine.describe() | {"command": command("prefill")}
    print(machine.lines(about))
    print("\n".join([*stall_lines(stalls), *reuse_lines(reuses)]))
    flags.out.write_text(json.dumps({"about": about, "stall": stalls, "reuse": reuses}, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    parser.add_argument("--long", type=int, default=900, help="tokens of the long prompts")
    parser.add_argument("--running", type=int, default=4, help="sessions that run meanwhile")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of each running session")
    parser.add_argument("--after", type=float, default=0.5, help="seconds after which the long prompt comes")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each service")
    parser.add_argument("--out", type=json_file, default=ROOT / "out/prefill.json")
    return parser.parse_args()


class Prompts:
    """Prompts that share no beginning, so that nothing of one is cached for another."""

    def __init__(self, target: Path, long: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        texts = PROMPTS.read_text().split(SEPARATOR)
        self._ids = [
            token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids
        ]
        self._long = long
        self._next = 0

    def take(self, length: int) -> Tokens:
        """Another prompt."""
        self._next += 1
        start = self._next * 37 % len(self._ids)
        turned = (self._ids[start:] + self._ids[:start]) * (1 + length // len(self._ids))
        return tuple(turned[:length])

    def long(self) -> Tokens:
        """Another long prompt."""
        return self.take(self._long)


class Prefill:
    """The experiments."""

    def __init__(self, client: Client, prompts: Prompts, flags: argparse.Namespace) -> None:
        self._client = client
        self._stub = client.stub("demo")
        self._prompts = prompts
        self._flags = flags

    def warm_up(self) -> None:
        """First requests of each mode are slower."""
        for mode in MODES:
            self._client.run(self._stub, [message(self._prompts.long(), mode, ANSWER)])

    def stall(self, mode: str) -> dict[str, Any]:
        """Gaps of running sessions alone, and of as many others while a long prompt prefills."""
        alone = self._client.run(self._stub, self._running(mode))
        long = message(self._prompts.long(), mode, ANSWER)
        delays = [0.0] * self._flags.running + [self._flags.after]
        *running, late = self._client.run(self._stub, [*self._running(mode), long], delays)
        window = self._flags.after, late.arrivals[0][0]
        progress(f"stall, {mode}: the long prompt took {window[1] - window[0]:.2f} s to its first token")
        return {
            "mode": mode,
            "alone": summary(waits(alone, (0.0, float("inf")))),
            "during": summary(waits(running, window)),
            "first_token_ms": (window[1] - window[0]) * 1e3,
        }

    def reuse(self) -> dict[str, float]:
        """A long prompt twice, with nothing else running."""
        wanted = message(self._prompts.long(), "auto", ANSWER)
        (first,), (second,) = (self._client.run(self._stub, [wanted]) for _ in range(2))
        progress(f"reuse: first token after {first.arrivals[0][0]:.3f} s, then {second.arrivals[0][0]:.3f} s")
        return {
            "first_ms": first.arrivals[0][0] * 1e3,
            "second_ms": second.arrivals[0][0] * 1e3,
            "cached": second.extra["cached"],
            **{
                f"{name}_ms": first.extra[name]
                for name in ("draft_prefill", "draft_lead")
                if name in first.extra
            },
        }

    def _running(self, mode: str) -> list[Any]:
        wanted = (self._prompts.take(SHORT) for _ in range(self._flags.running))
        return [message(prompt, mode, self._flags.tokens) for prompt in wanted]


def waits(requests: Iterable[SampledRequest], window: tuple[float, float]) -> list[float]:
    """Milliseconds between deliveries, of those gaps that the window touches."""
    start, end = window
    found: list[float] = []
    for request in requests:
        for (before, _), (after, _) in pairwise(request.arrivals):
            if before < end and after > start:
                found.append((after - before) * 1e3)
    return found


def summary(gaps: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, largest and number of gaps."""
    ordered = sorted(gaps)
    return {
        "p50": percentile(ordered, 0.5),
        "p99": percentile(ordered, 0.99),
        "largest": ordered[-1] if ordered else 0.0,
        "gaps": len(ordered),
    }


def stall_lines(stalls: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Medians over rounds."""
    yield f"\n{'gaps of running sessions, ms':30}{'p50':>8}{'p99':>8}{'largest':>9}{'gaps':>7}"
    for mode in MODES:
        mine = [stall for stall in stalls if stall["mode"] == mode]
        for when in ("alone", "during"):
            middle = {name: Spread.of([one[when][name] for one in mine]).middle for name in mine[0][when]}
            text = f"{mode}, {'alone' if when == 'alone' else 'a long prompt prefills'}"
            times = f"{middle['p50']:8.1f}{middle['p99']:8.1f}{middle['largest']:9.1f}"
            yield f"{text:30}{times}{middle['gaps']:7.0f}"
        first = Spread.of([one["first_token_ms"] for one in mine])
        spread = f"{first.middle:.0f} [{first.low:.0f}, {first.high:.0f}] ms"
        yield f"{mode}: first token of the long prompt after {spread}"


def reuse_lines(reuses: Sequence[dict[str, float]]) -> Iterable[str]:
    """Medians and quartiles over rounds."""
    meanings = {
        "first_ms": "first token of a new long prompt, ms",
        "second_ms": "first token of the same prompt again, ms",
        "cached": "tokens of it that were at hand",
        "draft_prefill_ms": "the draft forward that made its first candidates, ms",
        "draft_lead_ms": "candidates there before the first token by, ms",
    }
    yield ""
    for name, meaning in meanings.items():
        values = [one[name] for one in reuses if name in one]
        if values:
            spread = Spread.of(values)
            yield f"{meaning:54}{spread.middle:8.1f} [{spread.low:.1f}, {spread.high:.1f}]"


if __name__ == "__main__":
    run(main)
