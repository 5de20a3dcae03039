"""Counts the continuations that were kept for drafts to learn from, and those that were not."""

from __future__ import annotations

from enum import StrEnum

from outrider.telemetry.metric_parts import Maker


class CollectionOutcome(StrEnum):
    """What happened to one continuation."""

    WRITTEN = "written"
    DROPPED = "dropped"
    """Too many waited for the disk."""
    FAILED = "failed"
    """The disk did not take it."""


class CollectionInstruments:
    """Counts by outcome."""

    def __init__(self, make: Maker) -> None:
        self._collected = make.counter(
            "collected", "Continuations chosen to be kept for drafts to learn from, by outcome.", "outcome"
        )
        for outcome in CollectionOutcome:
            self._collected.labels(outcome)

    def count(self, outcome: CollectionOutcome) -> None:
        """One more."""
        self._collected.labels(outcome).inc()
