"""Calibration from the verify service's counters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.calibration import Bin, Observed, bins, read
from benchmarks.samples import SampledRequest
from benchmarks.workload import Cell
from outrider.telemetry.instruments import VerifyInstruments

CELL = Cell(0.0, 1, 0.0)


def page(*nodes: tuple[float, bool]) -> str:
    """What a verify service with these (estimate, accepted) nodes would show."""
    registry = CollectorRegistry()
    VerifyInstruments(registry).estimates(nodes)
    return generate_latest(registry).decode()


def test_nodes_are_counted_by_estimate() -> None:
    """Two nodes of about 0.9, of which one was accepted, and a rejected one of 0.1."""
    found = bins(read(page((0.92, True), (0.94, False), (0.1, False))))
    assert [(round(one.predicted, 6), one.observed, one.nodes) for one in found] == [
        (0.1, 0, 1),
        (0.93, 0.5, 2),
    ]


class FakeFleet:
    """Shows one page after another."""

    def __init__(self, *pages: str) -> None:
        self._pages = list(pages)

    def metrics(self, name: str) -> str:
        """The next page."""
        assert name == "verify"
        return self._pages.pop(0)


class FakeClient:
    """Answers nothing."""

    def run(self, draft: str, cell: Cell, prompts: object, options: object) -> list[SampledRequest]:
        """No requests."""
        return []


def test_only_what_an_arm_verified_counts() -> None:
    """Nodes of earlier requests are taken off, those of all the arm's turns add up."""
    first, second = [(0.5, True)] * 3, [(0.5, True)] * 4
    third = [*second, (0.5, False)]
    fleet = FakeFleet(page(*first), page(*second), page(*second), page(*third))
    arm = Observed(fleet, "auto", FakeClient(), "demo", "auto")
    arm.run(CELL, [(1,)], 1)
    arm.run(CELL, [(1,)], 1)
    assert bins(arm.counts) == [Bin(0.5, 0.5, 2.0)]
