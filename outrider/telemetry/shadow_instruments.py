"""Metrics of what drafts foresaw in sessions with a shadow, and of the draft replicas' weights."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from outrider.telemetry.metric_parts import MAX_REPLICAS, MAX_TASKS, OTHER, Bundle, Maker, Tasks

USUAL = ("FLOOD", "INTERNAL_ERROR", "OVERLOADED", "UNAVAILABLE")
"""Reasons for failures that are on the page from the start."""


class Role(StrEnum):
    """The role of a draft in a session."""

    SERVING = "serving"
    SHADOW = "shadow"


class ShadowInstruments:
    """Metrics of drafts by traffic label, version of the weights, and role."""

    def __init__(self, make: Maker) -> None:
        labels = ("task", "version", "role")
        self._tasks = Tasks()
        self._compared = Bundle(
            MAX_TASKS * 8,
            tokens=make.counter("compared_tokens", "Tokens committed in sessions with a shadow.", *labels),
            proposed=make.counter(
                "compared_proposed", "Compared tokens that the draft had a proposal for.", *labels
            ),
            foreseen=make.counter(
                "compared_foreseen", "Compared tokens that the draft proposed first.", *labels
            ),
        )
        self._failures = make.counter("shadow_failures", "Shadows that ended by an error.", "reason")
        self._promotions = make.counter("promotions", "Shadows that were promoted.")
        self._weights = make.gauge("draft_weights", "1 for each draft replica.", "draft", "version", "role")
        self._reasons = Tasks()
        for reason in USUAL:
            self._failures.labels(self._reasons.name(reason))

    def compared(
        self, task: str, version: str, role: Role, tokens: int, proposed: int, foreseen: int
    ) -> None:
        """Record a verdict in a session that has a shadow."""
        compared = self._compared.of(self._tasks.name(task), version, role)
        compared.tokens.inc(tokens)
        compared.proposed.inc(proposed)
        compared.foreseen.inc(foreseen)

    def failed(self, reason: str) -> None:
        """Record that a shadow ended with an error."""
        self._failures.labels(self._reasons.name(reason)).inc()

    def promoted(self) -> None:
        """Record that a shadow was promoted."""
        self._promotions.inc()

    def replicas(self, found: Iterable[tuple[str, str, Role]]) -> None:
        """Set the present draft replicas: endpoint, version, role."""
        self._weights.clear()
        for endpoint, version, role in list(found)[:MAX_REPLICAS]:
            self._weights.labels(endpoint, version or OTHER, role).set(1)
