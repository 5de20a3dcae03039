"""Compares how often nodes are accepted with the estimates, by the verify service's counters, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.arms.own import Client, OwnArm
from benchmarks.samples import SampledRequest
from benchmarks.workload import Cell, Tokens
from outrider.client.request import Mode
from scripts.local_services import LocalServices

PREFIX = "outrider_verify_calibration_"
COLUMNS = ("nodes", "predicted", "accepted")

Counts = dict[str, tuple[float, ...]]
"""By bucket of the estimate: verified nodes, sum of their estimates, accepted nodes."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Verified nodes with about the same estimate."""

    predicted: float
    observed: float
    nodes: float


def read(page: str) -> Counts:
    """The counts of a Prometheus page."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        column = family.name.removeprefix(PREFIX)
        for sample in family.samples:
            if column in COLUMNS and sample.name.endswith("_total"):
                found.setdefault(sample.labels["bucket"], {})[column] = sample.value
    return {bucket: tuple(values.get(column, 0.0) for column in COLUMNS) for bucket, values in found.items()}


def bins(counts: Counts) -> list[Bin]:
    """Mean estimate and share accepted of every bucket with nodes, least likely first."""
    filled = [(nodes, predicted, accepted) for nodes, predicted, accepted in counts.values() if nodes]
    return sorted(
        (Bin(predicted / nodes, accepted / nodes, nodes) for nodes, predicted, accepted in filled),
        key=lambda one: one.predicted,
    )


class Observed(OwnArm):
    """An arm whose verified nodes are counted; it must be the only one that runs."""

    def __init__(self, fleet: LocalServices, mode: Mode, client: Client, draft: str, name: str) -> None:
        super().__init__(mode, client, draft, name)
        self.counts: Counts = {}
        self._fleet = fleet

    def run(self, cell: Cell, prompts: Sequence[Tokens], tokens: int) -> list[SampledRequest]:
        """Run the arm and add what the counters grew by."""
        before = read(self._fleet.metrics("verify"))
        found = super().run(cell, prompts, tokens)
        for bucket, after in read(self._fleet.metrics("verify")).items():
            start = before.get(bucket, (0.0,) * len(after))
            sofar = self.counts.get(bucket, (0.0,) * len(after))
            self.counts[bucket] = tuple(c + a - b for c, a, b in zip(sofar, after, start, strict=True))
        return found
