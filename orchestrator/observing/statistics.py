"""What speculation did for one continuation, as raw counts and sums; readers compute ratios."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.protocol.messages import TokenBlock, Verdict

SUMMED = ("steps", "committed", "verified", "accepted", "draft_losses", "verify_losses")
"""Counters that are added up over the continuations of a request."""


@dataclass(slots=True)
class Statistics:
    """Counters of one continuation; the names are those of `SpeculationStats` in the protocol."""

    steps: int = 0
    committed: int = 0
    """Tokens that the steps committed."""
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    """Number of steps that verified candidates, by how many they accepted: 0, 1, 2, ..."""
    hits: int = 0
    predicted: int = 0
    """Verified nodes that the caller's prediction proposed."""
    predicted_accepted: int = 0
    draft_losses: int = 0
    verify_losses: int = 0
    cached: int = 0
    """Prompt tokens whose keys and values the replica already had when the first verify session opened."""
    forward_us: int = 0
    sample_us: int = 0
    queue_us: int = 0
    idle_us: int = 0
    draft_us: int = 0
    decode_us: int = 0
    """Time of the steps after the first verdict, with their queueing, by the verify replicas' clocks."""
    decode_busy_us: int = 0
    """The part of `decode_us` in forwards, sampling and tree walks."""
    first_token_at: float | None = None
    """Time of the first verdict, on the clock of the caller of `add_verdict`."""

    @classmethod
    def total(cls, parts: Iterable[Statistics]) -> Statistics:
        """The counts of several continuations of one prompt together."""
        found = cls()
        for part in parts:
            for name in SUMMED:
                setattr(found, name, getattr(found, name) + getattr(part, name))
            found.cached = max(found.cached, part.cached)
        return found

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per step."""
        return self.committed / self.steps if self.steps else 0.0

    def add_block(self, block: TokenBlock) -> None:
        """Count a block that a draft sent."""
        self.drafted += len(block)
        self.draft_us += block.expand_micros

    def add_verdict(self, verdict: Verdict, now: float) -> None:
        """Count a verify step."""
        times = verdict.times
        busy_us = times.forward_micros + times.sample_micros
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.decode_us += times.queue_micros + busy_us
            self.decode_busy_us += busy_us
        self.steps += 1
        self.committed += len(verdict.tokens)
        self.verified += verdict.verified
        self.accepted += verdict.accepted
        self.hits += verdict.hit
        self.predicted += verdict.predicted
        self.predicted_accepted += verdict.predicted_accepted
        if verdict.verified:
            self._count_accepted(verdict.accepted)
        self.forward_us += times.forward_micros
        self.sample_us += times.sample_micros
        self.queue_us += times.queue_micros
        self.idle_us += times.idle_micros

    def _count_accepted(self, accepted: int) -> None:
        """Count one more step that accepted `accepted` candidates."""
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1
