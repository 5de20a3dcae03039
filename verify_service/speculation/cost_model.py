"""T(n): the time of one target step with n tokens, measured at start-up and kept current.

T is measured at some points and interpolated between them. It never falls: pooling adjacent violators makes
the noisy points monotone. Where the machine computes more tokens in the same time, T is flat, and the
scheduler adds such tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

OWN_WEIGHT = 0.15
"""Smallest weight of one observation in the estimates of the points around it. The first observations weigh
more, in all points: real steps do more than those measured at the start, so all estimates rise first."""
OTHERS_WEIGHT = 0.05
"""Smallest weight in the estimates of the other points: a machine that slows down slows every step."""
RETRY = 0.003
"""Share by which a step that left nodes out lowers the next larger point towards the one that was run. So a
point whose estimate is too slow is tried again after some hundred such steps. A point that really is slow
costs one long step each time. `CostModel.approach` moves whole estimates by this share."""
LARGEST_RATIO = 2.0
"""Largest ratio of an observation to its estimate that counts, because a single pause is no trend."""


class CostModel:
    """Seconds of a step by its number of tokens, for 1 to `max_tokens` tokens.

    `points` are token counts in rising order and `seconds` their measured times.
    """

    def __init__(self, points: Sequence[int], seconds: Sequence[float], max_tokens: int) -> None:
        self._points = list(points)
        self._measured = list(seconds)
        self._monotone = _monotone(self._measured)
        self._observed = 0
        # By token count: the point at or below it, and how far it lies towards the next one.
        self._places = [self._place(tokens) for tokens in range(max_tokens + 1)]

    @property
    def points(self) -> Sequence[int]:
        """Token counts between which T is linear."""
        return self._points

    def copy(self) -> CostModel:
        """Return a second model with the same estimates, which learns separately."""
        return CostModel(self._points, self._measured, len(self._places) - 1)

    def seconds(self, tokens: int) -> float:
        """Return T(tokens); counts above `max_tokens` cost as much as `max_tokens`."""
        index, share = self._places[min(tokens, len(self._places) - 1)]
        low = self._monotone[index]
        return low + share * (self._monotone[index + 1] - low) if share else low

    def slope(self, tokens: int, stretch: int) -> float:
        """Return the mean seconds that each of `stretch` more tokens adds to a step of `tokens`."""
        return (self.seconds(tokens + stretch) - self.seconds(tokens)) / stretch

    def observe(self, tokens: int, seconds: float, nodes_left: bool = False) -> None:
        """Learn from a step that ran `tokens` tokens in `seconds`; `nodes_left`: it could have run more, but
        their time seemed to cost more than they bring.
        """
        ratio = seconds / self.seconds(tokens)
        ratio = min(max(ratio, 1.0 / LARGEST_RATIO), LARGEST_RATIO)
        index, share = self._places[min(tokens, len(self._places) - 1)]
        own = {index} if share == 0.0 else {index, index + 1}
        self._observed += 1
        first = 1.0 / (1 + self._observed)
        for point in range(len(self._measured)):
            weight = max(OWN_WEIGHT if point in own else OTHERS_WEIGHT, first)
            self._measured[point] *= 1.0 + weight * (ratio - 1.0)
        if nodes_left:
            self._sink(max(own))
        self._monotone = _monotone(self._measured)

    def approach(self, other: CostModel) -> None:
        """Move the estimates a little towards those of another model with the same points."""
        pairs = zip(self._measured, other._measured, strict=True)
        self._measured = [own + RETRY * (their - own) for own, their in pairs]
        self._monotone = _monotone(self._measured)

    def _sink(self, run: int) -> None:
        """Lower the point above `run` a little, so that it is tried again."""
        above = run + 1
        if above < len(self._measured):
            self._measured[above] -= RETRY * max(self._measured[above] - self._measured[run], 0.0)

    def _place(self, tokens: int) -> tuple[int, float]:
        index = bisect_left(self._points, tokens)
        if index == len(self._points):
            return index - 1, 0.0
        if index == 0 or self._points[index] == tokens:
            return index, 0.0
        low, high = self._points[index - 1], self._points[index]
        return index - 1, (tokens - low) / (high - low)


def measuring_points(max_tokens: int, edges: Sequence[int] = ()) -> list[int]:
    """Return the token counts to measure: powers of two, the points halfway between them, and both sides of
    each of `edges`, beyond which a step gets longer.
    """
    counts = {1, max_tokens, *(edge + over for edge in edges for over in (0, 1) if edge + over < max_tokens)}
    power = 2
    while power < max_tokens:
        counts.update((power, min(power + power // 2, max_tokens)))
        power *= 2
    return sorted(counts)


def _monotone(values: Sequence[float]) -> list[float]:
    """Return the closest sequence that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, weight = pools.pop()
            mean = (mean * count + before * weight) / (count + weight)
            count += weight
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
