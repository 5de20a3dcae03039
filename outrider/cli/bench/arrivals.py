"""When requests are sent. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, each of which sends its next request when its last one has ended."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at fixed times, whether or not earlier ones have ended: seconds after the first, one each."""

    offsets: tuple[float, ...]


ArrivalPattern: TypeAlias = ClosedLoop | OpenLoop


def poisson(rate: float, count: int, rng: random.Random) -> tuple[float, ...]:
    """Arrivals in seconds, the first at 0, with exponential pauses of 1 / rate on average.

    At an infinite rate, all arrive at once.
    """
    if math.isinf(rate):
        return (0.0,) * count
    offsets = [0.0]
    while len(offsets) < count:
        offsets.append(offsets[-1] + rng.expovariate(rate))
    return tuple(offsets[:count])
