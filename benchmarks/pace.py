"""What a pace brings under load: how many of the requests that ask for one keep it, and what the others lose.

    python -m benchmarks.pace --clients 16 --paced 4

In a turn all clients send a request at once; in every other turn some of them ask for a pace. It is a share
(`--share`) of the median time per token that these had without one in a first turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks import machine, pairs
from benchmarks.answers import client_of
from benchmarks.flags import new_parser
from benchmarks.pairs import load_pair
from benchmarks.workload import PROMPTS, SEPARATOR
from outrider.client import Client
from outrider.client.request import Options
from outrider.client.results import Generation
from scripts.console import run

ARMS = ("no pace", "pace")


@dataclass(slots=True)
class Found:
    """Seconds per token of the requests that may ask for a pace, and of the others."""

    paced: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens per second of all requests of a turn."""


def main() -> int:
    """Measure and print."""
    flags = _flags()
    print(machine.lines(machine.describe()) + "\n")
    pair = load_pair(flags)
    with client_of(pair) as client, ThreadPoolExecutor(flags.clients) as threads:
        turn = _Turn(client, threads, flags, PROMPTS.read_text().split(SEPARATOR))
        turn.run(0.0, -1)  # warm-up
        seconds = statistics.median(turn.run(0.0, 0)[0]) * flags.share
        found = {arm: Found() for arm in ARMS}
        for index in range(1, flags.turns + 1):
            for arm in ARMS if index % 2 else reversed(ARMS):
                paced, others, rate = turn.run(seconds if arm == "pace" else 0.0, index)
                found[arm].paced += paced
                found[arm].others += others
                found[arm].rates.append(rate)
    _print(found, seconds)
    return 0


@dataclass(frozen=True, slots=True)
class _Turn:
    client: Client
    threads: ThreadPoolExecutor
    flags: argparse.Namespace
    prompts: Sequence[str]

    def run(self, pace: float, index: int) -> tuple[list[float], list[float], float]:
        """One request of every client; seconds per token of the paced and the others, tokens per second."""
        flags = self.flags
        paces = [pace if number < flags.paced else 0.0 for number in range(flags.clients)]
        numbers = range(flags.clients)
        found = list(self.threads.map(self._generate, [index] * flags.clients, numbers, paces))
        seconds = [one.end.speculation["decode_micros"] * 1e-6 / (len(one.token_ids) - 1) for one in found]
        longest = max(one.end.speculation["total_micros"] for one in found) * 1e-6
        total = sum(len(one.token_ids) for one in found)
        return seconds[: flags.paced], seconds[flags.paced :], total / longest

    def _generate(self, index: int, number: int, pace: float) -> Generation:
        flags = self.flags
        options = Options(temperature=flags.temperature, seed=1000 * (index + 1) + number)
        options |= Options(max_tokens=flags.tokens, ignore_eos=True)
        options |= Options(seconds_per_token=pace) if pace else Options()
        prompt = self.prompts[(index * flags.clients + number) % len(self.prompts)]
        return self.client.generate(prompt, **options).generations[0]


def _print(found: dict[str, Found], pace: float) -> None:
    print(f"pace: {1000 * pace:.1f} ms per token\n")
    print("medians of milliseconds per token, and tokens per second of all\n")
    print(f"{'arm':10}{'kept it':>9}{'paced':>10}{'others':>9}{'tokens/s':>10}")
    for arm, one in found.items():
        kept = sum(seconds <= pace for seconds in one.paced) / len(one.paced)
        paced, others = _milliseconds(one.paced), _milliseconds(one.others)
        rate = statistics.median(one.rates)
        print(f"{arm:10}{kept:9.0%}{paced:10.1f}{others:9.1f}{rate:10.1f}")


def _milliseconds(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds) if seconds else 0.0


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__)
    pairs.add_flags(parser)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--paced", type=int, default=4, help="clients that ask for a pace")
    parser.add_argument(
        "--share", type=float, default=0.8, help="the pace, of the time per token without one"
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=96, help="of each request")
    parser.add_argument("--turns", type=int, default=6, help="of each arm")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
