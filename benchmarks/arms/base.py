"""The interface of an arm: a way to serve requests that can be timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.samples import SampledRequest
from benchmarks.workload import Cell, Tokens

OWN, REFERENCE, PEER = "own", "reference", "peer"


class Arm(Protocol):
    """One column of the comparison."""

    @property
    def name(self) -> str:
        """The name that tables show."""

    @property
    def kind(self) -> str:
        """OWN, REFERENCE (a peer whose greedy text the others' must equal) or PEER."""

    @property
    def devices(self) -> int:
        """Cores that its models use."""

    @property
    def speculates(self) -> bool:
        """True if the arm uses a draft, and must get some of its tokens accepted."""

    @property
    def engine(self) -> str:
        """The software that it runs on, with versions."""

    def runs(self, cell: Cell) -> bool:
        """True if the arm can run a cell."""

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """Serve all prompts at once, `tokens` new tokens each whatever the model would end with."""
