"""Adds up the answers of one arm, and starts the services that give them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.pairs import Pair
from outrider.client import Client, Generation, Result
from scripts.local_services import services

TIMEOUT = 600.0


@dataclass(slots=True)
class Answers:
    """The answers of one arm, each with one continuation, and sums over them."""

    found: list[Generation] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add an answer."""
        self.found.append(result.generations[0])

    def sum(self, name: str) -> float:
        """The sum of a count of `SpeculationStats` over all answers."""
        return sum(one.end.speculation[name] for one in self.found)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The tokens of each answer."""
        return [one.token_ids for one in self.found]

    @property
    def length(self) -> float:
        """Tokens per step."""
        return sum(map(len, self.texts)) / max(self.sum("steps"), 1)

    @property
    def rate(self) -> float:
        """Tokens per second after the first of each; 0 where all came in one step."""
        seconds = self.sum("decode_micros") * 1e-6
        return (sum(map(len, self.texts)) - len(self.found)) / seconds if seconds else 0.0


@contextmanager
def client_of(pair: Pair) -> Iterator[Client]:
    """A client of `outrider up` with a pair's target and the demo draft, until the block ends."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services(pair.target, pair.dtype, Path(folder) / "up.log", pair.weights) as up,
        Client(up["endpoint"], timeout=TIMEOUT) as client,
    ):
        yield client
