"""Learns while serving how often the target chooses a proposed child, and how sharply the draft should rank.

Nothing here affects which tokens are committed: estimates only decide what is drafted and verified first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp

from outrider.recent import Recent

BUCKETS = 40
"""Number of buckets of a draft model's confidence: half for greedy rows, then half for sampled ones."""
LOOKUP_BUCKETS = 12
"""Number of buckets of a match length."""
SHARPNESS_GRID = (0.5, 0.7, 0.85, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0, 5.0)
"""Factors for the draft's log probability, relative to the noise, that `SharpnessFit` compares."""

FLATNESS = 1.5
"""A sampled token's confidence is its share of exp(score / F), with F = FLATNESS / min(temperature, 1)."""

_RANKS = 8
"""Ranks with counts of their own; higher ones share those of the last."""
_HALF = BUCKETS // 2
_WIDEST_ODDS = 5.0
"""Log odds from minus this number to this number are divided among the buckets of a half."""
EDGES = [1.0 / (1.0 + exp(_WIDEST_ODDS - edge * 2.0 * _WIDEST_ODDS / _HALF)) for edge in range(1, _HALF)]
"""Confidences at which each next bucket of a half begins."""
DECAY = 0.999
"""Share of a count that is kept at each further observation of its kind."""
PRIOR_WEIGHT = 8.0
"""Number of observations that a bucket's prior counts as."""
SHARED_WEIGHT = 32.0
"""Number of observations that the estimate over all tasks counts as in a task's own estimate."""
HEAD_START = 2.0
"""Number of hits that sharpness 1 starts with, before anything is learned."""
_MAX_TASKS = 64
"""Most tasks with estimates of their own."""


def bucket(confidence: float, greedy: bool) -> int:
    """Bucket of a confidence in [0, 1]: 20 equal steps of log odds from -5 to 5."""
    known = confidence == confidence  # NaN, from a broken draft, counts as no confidence
    place = bisect_right(EDGES, confidence) if known else 0
    return place if greedy else place + _HALF


def confidence_priors() -> list[float]:
    """Acceptance by bucket of confidence before anything is learned: the confidence itself."""
    width = 2.0 * _WIDEST_ODDS / _HALF
    middles = [1.0 / (1.0 + exp(_WIDEST_ODDS - (place + 0.5) * width)) for place in range(_HALF)]
    return middles * 2


def lookup_bucket(match_length: int) -> int:
    """Bucket of a match length: each length up to 8, then doublings."""
    if match_length <= 8:
        return max(match_length, 1) - 1
    return min((match_length - 1).bit_length() + 4, LOOKUP_BUCKETS - 1)


def lookup_priors() -> list[float]:
    """Acceptance by bucket of match length before anything is learned."""
    return [0.2, 0.3, 0.42, 0.52, 0.6, 0.66, 0.7, 0.74, 0.8, 0.88, 0.93, 0.95]


class AcceptanceModel:
    """Conditional acceptance of a child by (bucket, rank), from counts that decay.

    The fewer observations a task has, the closer its estimate is to that over all tasks; and the fewer there
    are over all tasks, the closer that is to the bucket's prior. Beyond 64 tasks the one that was observed
    longest ago is forgotten.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = list(priors)
        self._shared = _Counts(len(priors) * _RANKS)
        self._tasks = Recent[str, _Counts](_MAX_TASKS)

    def estimate(self, bucket: int, rank: int, task: str = "") -> float:
        """The probability that the target chooses this child if its walk reaches the parent."""
        cell = bucket * _RANKS + (rank if rank < _RANKS else _RANKS - 1)
        shared = self._shared
        overall = (shared.taken[cell] + PRIOR_WEIGHT * self._priors[bucket]) / (
            shared.seen[cell] + PRIOR_WEIGHT
        )
        counts = self._tasks.get(task)
        if counts is None:
            return overall
        return (counts.taken[cell] + SHARED_WEIGHT * overall) / (counts.seen[cell] + SHARED_WEIGHT)

    def observe(self, bucket: int, rank: int, taken: bool, task: str = "") -> None:
        """Record that the walk reached the parent, and whether the target chose this child."""
        cell = bucket * _RANKS + min(rank, _RANKS - 1)
        self._shared.add(cell, taken)
        if task:
            self._tasks.use(task, lambda: _Counts(len(self._priors) * _RANKS)).add(cell, taken)


class _Counts:
    """Decayed counts of observations and of chosen children, per cell."""

    __slots__ = ("seen", "taken")

    def __init__(self, cells: int) -> None:
        self.seen = [0.0] * cells
        self.taken = [0.0] * cells

    def add(self, cell: int, taken: bool) -> None:
        self.seen[cell] = self.seen[cell] * DECAY + 1.0
        self.taken[cell] = self.taken[cell] * DECAY + taken


class SharpnessFit:
    """The sharpness of SHARPNESS_GRID that puts the target's choice first most often.

    Every observed row tests all sharpnesses, because its ranking says which token each would have put first.
    Counts decay over about 1000 rows and are smoothed over neighbours; 1.0 has a small head start.
    """

    def __init__(self) -> None:
        self._hits = [HEAD_START if sharpness == 1.0 else 0.0 for sharpness in SHARPNESS_GRID]
        self._value = 1.0

    @property
    def value(self) -> float:
        """The sharpness to rank with at present."""
        return self._value

    def observe(self, winners: Sequence[int], chosen: int) -> None:
        """Record that the target chose `chosen`; `winners` has the token that each sharpness put first.

        `winners` come from `outrider.sampling.chooser.Ranking`; a greedy row has none and teaches nothing.
        """
        if not winners:
            return
        hits = [old * DECAY + (new == chosen) for old, new in zip(self._hits, winners, strict=True)]
        smooth = [
            left + 2.0 * here + right
            for left, here, right in zip(hits[:1] + hits[:-1], hits, hits[1:] + hits[-1:], strict=True)
        ]
        self._hits = hits
        self._value = SHARPNESS_GRID[smooth.index(max(smooth))]
