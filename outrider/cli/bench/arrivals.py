"""When requests are sent. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many users, each sending its next request when the last one has ended."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Users who come whether or not others have been served: seconds after the first, one per request."""

    offsets: tuple[float, ...]


ArrivalPattern: TypeAlias = ClosedLoop | OpenLoop


def poisson(rate: float, count: int, rng: random.Random) -> tuple[float, ...]:
    """Arrivals in seconds, the first at 0, with exponential pauses of 1 / rate on average.

    An infinite rate is all at once.
    """
    if math.isinf(rate):
        return (0.0,) * count
    offsets = [0.0]
    while len(offsets) < count:
        offsets.append(offsets[-1] + rng.expovariate(rate))
    return tuple(offsets[:count])
