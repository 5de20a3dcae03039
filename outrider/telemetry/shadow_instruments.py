"""What drafts foresaw in sessions that have a shadow, and which weights the draft replicas have."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from prometheus_client import Counter

from outrider.telemetry.metric_parts import MAX_REPLICAS, MAX_TASKS, OTHER, Children, Maker, Tasks

USUAL = ("FLOOD", "INTERNAL_ERROR", "OVERLOADED", "UNAVAILABLE")
"""Reasons of failures that are on the page from the start."""


class Role(StrEnum):
    """What a draft is in a session."""

    SERVING = "serving"
    SHADOW = "shadow"


class Counts(Protocol):
    """Committed tokens, those that the draft proposed something for, and those that it foresaw."""

    @property
    def tokens(self) -> int:
        """All."""

    @property
    def proposed(self) -> int:
        """Some."""

    @property
    def foreseen(self) -> int:
        """The best of them."""


class ShadowInstruments:
    """By traffic label, version of the weights, and role."""

    def __init__(self, make: Maker) -> None:
        labels = ("task", "version", "role")
        self._tasks = Tasks()
        self._counters = (
            make.counter("compared_tokens", "Tokens committed in sessions that have a shadow.", *labels),
            make.counter(
                "compared_proposed", "Those of them that the draft proposed something for.", *labels
            ),
            make.counter("compared_foreseen", "Those of them that were its first choice.", *labels),
        )
        self._failures = make.counter("shadow_failures", "Shadows that ended by an error.", "reason")
        self._promotions = make.counter("promotions", "Shadows that were promoted.")
        self._weights = make.gauge(
            "draft_weights",
            "1 for each draft replica, with its weights and role.",
            "draft",
            "version",
            "role",
        )
        self._reasons = Tasks()
        for reason in USUAL:
            self._failures.labels(self._reasons.name(reason))
        self._children = Children(self._bind, MAX_TASKS * 8, self._forget)

    def compared(self, task: str, version: str, role: Role, counts: Counts) -> None:
        """A verdict came in a session that has a shadow."""
        children = self._children.at(self._tasks.name(task), version, role)
        for child, count in zip(children, (counts.tokens, counts.proposed, counts.foreseen), strict=True):
            child.inc(count)

    def failed(self, reason: str) -> None:
        """A shadow ended by an error."""
        self._failures.labels(self._reasons.name(reason)).inc()

    def promoted(self) -> None:
        """A shadow went to work."""
        self._promotions.inc()

    def replicas(self, found: Iterable[tuple[str, str, Role]]) -> None:
        """The draft replicas now: endpoint, version, role."""
        self._weights.clear()
        for endpoint, version, role in list(found)[:MAX_REPLICAS]:
            self._weights.labels(endpoint, version or OTHER, role).set(1)

    def _bind(self, key: tuple[str, ...]) -> tuple[Counter, ...]:
        return tuple(counter.labels(*key) for counter in self._counters)

    def _forget(self, key: tuple[str, ...]) -> None:
        for counter in self._counters:
            counter.remove(*key)
