"""The measurements of a target and its drafts, and the advice that follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from outrider.cli.advise.chains import acceptance
from outrider.cli.advise.options import WITHOUT, DraftOption, Room

MIN_GAIN = 0.03
"""A draft that brings less is not worth its process."""
RESTING = 0.5
"""Share of the rounds with a wish for a draft below which drafts rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a simulated load comes to."""

    sessions: int
    tokens_per_second: float
    tokens_per_step: float
    drafting: float
    """Share of the rounds for which the target wants a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Time and memory of a model."""

    step_seconds: float
    """Over one token, with what its service does beside it."""
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
        """Sessions from which on its drafts rest; None: up to the most that were tried they do not."""
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
    """Task of each text; empty: it has none."""
    tokens: int
    """Tokens of all texts."""
    longest: int
    """Tokens of a prompt and its text."""
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
        """Over all loads: the geometric mean, which does not depend on what is divided by what."""
        ratios = self.speed_ups(candidate)
        return exp(sum(map(log, ratios)) / len(ratios))

    @property
    def best(self) -> MeasuredDraft | None:
        """The candidate to take; None: none brings MIN_GAIN."""
        best = max(self.candidates, key=self.mean_speed_up)
        return best if self.mean_speed_up(best) >= 1.0 + MIN_GAIN else None

    @property
    def advice(self) -> DraftOption:
        """What to take."""
        best = self.best
        return WITHOUT if best is None else best.option
