"""The work of every arm: prompts as token ids, and the cells of the grid."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from math import ceil
from pathlib import Path

from outrider.cli.bench.prompts import read_labelled
from outrider.cli.bench.target import Prompt
from outrider.cli.prompt_ids import token_ids_of

PROMPTS = Path(__file__).with_name("prompts.txt")
"""A dozen beginnings of Python files in the manner of the standard library, which the demo pair was trained
on; written for this benchmark, so it was trained on none of them."""
SEPARATOR = "########\n"
SEED = 1

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One point of the grid."""

    round_trip_ms: float
    concurrency: int
    temperature: float

    def __str__(self) -> str:
        network = f", RTT {self.round_trip_ms:g} ms" if self.round_trip_ms else ""
        return f"concurrency {self.concurrency}, T = {self.temperature:g}{network}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch that every arm runs: a cell, and which prompts."""

    cell: Cell
    index: int
    prompts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how many tokens are wanted of each."""

    prompts: tuple[Tokens, ...]
    tokens: int

    def of(self, turn: Turn) -> list[Tokens]:
        """The prompts of a turn."""
        return [self.prompts[index] for index in turn.prompts]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `load_workload` reads."""
    parser.add_argument("--prompts", metavar="FILE", help="texts or lists of token ids, as JSON or .jsonl")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="longest prompt; the rest is cut off")
    parser.add_argument(
        "--joined", action="store_true", help="a prompt goes on with those after it, up to the longest"
    )
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per request")


def load_workload(flags: argparse.Namespace, target: Path) -> Workload:
    """The prompts that the flags name, or the dozen that come with the benchmark.

    Raises:
        OutriderError: they cannot be read, or have no tokens.
    """
    given: Sequence[Prompt] = PROMPTS.read_text().split(SEPARATOR)
    if flags.prompts is not None:
        given = [entry.prompt for entry in read_labelled(flags.prompts)]
    ids = token_ids_of(given, str(target))
    if flags.joined:
        ids = joined(ids, flags.prompt_tokens)
    return Workload(tuple(prompt[: flags.prompt_tokens] for prompt in ids), flags.tokens)


def joined(prompts: Sequence[Tokens], tokens: int) -> list[Tokens]:
    """Each prompt with those after it, again from the first after the last, until there are `tokens`."""
    following = [chain.from_iterable(islice(cycle(prompts), first, None)) for first in range(len(prompts))]
    return [tuple(islice(tokens_of, tokens)) for tokens_of in following]


def turns(
    cells: Sequence[Cell], requests: int, min_turns: int, prompts: int, in_a_row: int = 1
) -> Iterator[Turn]:
    """The turns of all cells, interleaved: the first of each cell, then the second of each, ...

    A turn is `in_a_row` requests for each place of its cell's concurrency. A cell has as many turns as
    `requests` requests take, and not fewer than `min_turns`. Prompts go round.
    """
    sizes = {cell: cell.concurrency * in_a_row for cell in cells}
    counts = {cell: max(min_turns, ceil(requests / sizes[cell])) for cell in cells}
    for index in range(max(counts.values())):
        for cell in cells:
            if index < counts[cell]:
                first = index * sizes[cell]
                yield Turn(cell, index, tuple((first + i) % prompts for i in range(sizes[cell])))
