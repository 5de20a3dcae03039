"""Service level objectives: bounds on latencies within which an answer counts as fast enough. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from outrider.cli.bench.outcomes import RequestOutcome

Figure: TypeAlias = Literal["ttft", "tpot", "e2e"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest value, in seconds, that a figure of a request may have."""

    figure: Figure
    seconds: float

    def met(self, outcome: RequestOutcome) -> bool:
        """Whether a request kept to the bound; True if the request lacks the figure."""
        value = cast(float | None, getattr(outcome, self.figure))
        return value is None or value <= self.seconds

    def __str__(self) -> str:
        milliseconds = self.seconds * 1000
        shown = f"{self.seconds:g} s" if self.seconds >= 1 else f"{milliseconds:g} ms"
        return f"{self.figure} <= {shown}"


Slo: TypeAlias = tuple[Bound, ...]


def parse_slo(text: str) -> Slo:
    """Bounds such as `ttft=500ms,tpot=50ms,e2e=10s`.

    Raises:
        ValueError: the text does not parse; says what is wrong.
    """
    bounds = tuple(_bound(part.strip()) for part in text.split(","))
    if len({bound.figure for bound in bounds}) < len(bounds):
        raise ValueError(f"names a figure twice: {text!r}")
    return bounds


def good(outcome: RequestOutcome, slo: Slo) -> bool:
    """Whether a request was answered within all bounds."""
    return outcome.error is None and all(bound.met(outcome) for bound in slo)


def _bound(text: str) -> Bound:
    found = re.fullmatch(r"(\w+)=([\d.]+)(ms|s)", text)
    if found is None or found[1] not in FIGURES:
        raise ValueError(f"must be such as ttft=500ms,tpot=50ms,e2e=10s, not {text!r}")
    try:
        seconds = float(found[2]) * UNITS[found[3]]
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"needs a time above 0, not {text!r}")
    return Bound(cast(Figure, found[1]), seconds)
