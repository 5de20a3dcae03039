"""Requests and batches as they were measured, and the figures that follow from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import fmean, median, quantiles

from benchmarks.workload import Tokens, Turn

Figures = dict[str, float]
"""Values by name; a figure that an arm cannot give is left out."""


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """One continuation as its caller saw it."""

    tokens: Tokens
    arrivals: tuple[tuple[float, int], ...]
    """(seconds since the batch began, tokens delivered then), in order."""
    passes: int = 0
    """Target passes that made the tokens after the first delivery; 0: one per further delivery."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further figures, of arms that can tell."""
    sent: float = 0.0
    """Seconds since the batch began."""

    @property
    def delivered(self) -> int:
        """The number of tokens that came. It may be more than `tokens`: not all are known by their ids."""
        return sum(count for _, count in self.arrivals)


@dataclass(frozen=True, slots=True)
class Batch:
    """One turn of one arm."""

    arm: str
    turn: Turn
    requests: tuple[SampledRequest, ...]

    def figures(self) -> Figures:
        """All figures of the batch."""
        ends = [request.arrivals[-1][0] for request in self.requests]
        waits = sorted(gap * 1e3 for request in self.requests for gap in gaps(request))
        return {
            "tokens_s": sum(request.delivered for request in self.requests) / max(ends),
            "decode_s": sum(map(decode_rate, self.requests)),
            "ttft_ms": median(request.arrivals[0][0] - request.sent for request in self.requests) * 1e3,
            "gap_p50_ms": percentile(waits, 0.5),
            "gap_p99_ms": percentile(waits, 0.99),
            "length": acceptance_length(self.requests),
            **steady(self.requests),
            **means(request.extra for request in self.requests),
        }


def steady(requests: Sequence[SampledRequest]) -> Figures:
    """Tokens per second until the last request was sent: till then one ran in every place.

    What follows is a batch that grows smaller, the longer the more its texts differ in speed. None when all
    were sent at once.
    """
    end = max(request.sent for request in requests)
    tokens = sum(count for request in requests for at, count in request.arrivals if at <= end)
    return {"steady_s": tokens / end} if tokens else {}


def gaps(request: SampledRequest) -> list[float]:
    """Seconds between deliveries; a delivery may hold several tokens."""
    return [after - before for (before, _), (after, _) in pairwise(request.arrivals)]


def decode_rate(request: SampledRequest) -> float:
    """Tokens per second after the first delivery."""
    (first, count), (last, _) = request.arrivals[0], request.arrivals[-1]
    return (request.delivered - count) / (last - first) if last > first else 0.0


def acceptance_length(requests: Sequence[SampledRequest]) -> float:
    """Tokens per target pass after the first delivery."""
    tokens = sum(request.delivered - request.arrivals[0][1] for request in requests)
    return tokens / max(1, sum(request.passes or len(request.arrivals) - 1 for request in requests))


def means(rows: Iterable[Mapping[str, float]]) -> Figures:
    """Mean of every figure that all rows have."""
    found = list(rows)
    names = [name for name in found[0] if all(name in row for row in found)]
    return {name: fmean(row[name] for row in found) for name in names}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of values does not exceed; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(low, middle, high)


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """Spread of ours ÷ theirs over the turns (by index) that both ran; None when there is none.

    Both ran a turn on the same prompts right after each other, so that what the machine did meanwhile
    divides out.
    """
    ratios = [ours[index] / theirs[index] for index in sorted(ours.keys() & theirs.keys()) if theirs[index]]
    return Spread.of(ratios) if ratios else None
