"""The measurements of a target and its drafts, and the advice that follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from outrider.cli.advise.chains import acceptance
from outrider.cli.advise.options import WITHOUT, DraftOption, Room

MIN_GAIN = 0.03
"""Least gain in tokens per second, as a share, at which a draft is worth its process."""
RESTING = 0.5
"""A draft counts as resting where the target wants a draft for less than this share of the rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The result of one simulated load."""

    sessions: int
    tokens_per_second: float
    tokens_per_step: float
    drafting: float
    """Share of the rounds for which the target wants a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Time and memory of a model."""

    step_seconds: float
    """Seconds of a step over one token, including the other work of its service."""
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDraft:
    """One draft, with its size, its chains and its simulated rates."""

    option: DraftOption
    size: Size
    runs: tuple[tuple[int, ...], ...]
    """Chains of each text; see `chains`."""
    rates: tuple[Rate, ...]

    def acceptance(self, tasks: Sequence[str], task: str | None = None) -> list[float]:
        """Share of its chains whose first 1, 2, ... tokens are all right, of one task's texts or of all."""
        return acceptance([run for run, of in zip(self.runs, tasks, strict=True) if task in (None, of)])

    @property
    def rests_from(self) -> int | None:
        """The least number of sessions from which on the draft rests; None: it did not in any tried load."""
        resting: int | None = None
        for rate in reversed(self.rates):
            if rate.drafting >= RESTING:
                break
            resting = rate.sessions
        return resting


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything about one target and its traffic."""

    target: str
    dtype: str
    temperature: float
    size: Size
    tasks: tuple[str, ...]
    """Task of each text; an empty text where it has none."""
    tokens: int
    """Number of tokens of all texts together."""
    longest: int
    """Most tokens of a prompt and its text."""
    without: tuple[Rate, ...]
    """Rates without drafts, by load."""
    candidates: tuple[MeasuredDraft, ...]
    machine: Mapping[str, str]

    @property
    def room(self) -> Room:
        """What the services must have room for."""
        return Room(max(rate.sessions for rate in self.without), self.longest)

    def speed_ups(self, candidate: MeasuredDraft) -> list[float]:
        """Tokens per second, as a multiple of those without drafts, by load."""
        pairs = zip(candidate.rates, self.without, strict=True)
        return [rate.tokens_per_second / alone.tokens_per_second for rate, alone in pairs]

    def mean_speed_up(self, candidate: MeasuredDraft) -> float:
        """The geometric mean over all loads; that of the inverse ratios is just its inverse."""
        ratios = self.speed_ups(candidate)
        return exp(sum(map(log, ratios)) / len(ratios))

    @property
    def best(self) -> MeasuredDraft | None:
        """The candidate to take; None: none brings MIN_GAIN."""
        best = max(self.candidates, key=self.mean_speed_up)
        return best if self.mean_speed_up(best) >= 1.0 + MIN_GAIN else None

    @property
    def advice(self) -> DraftOption:
        """The option to take."""
        best = self.best
        return WITHOUT if best is None else best.option
