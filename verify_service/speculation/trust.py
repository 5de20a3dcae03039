"""How far a draft's acceptance estimates are believed.

The draft calibrates its estimates itself; this guards the target's budget against one that does it badly,
or lies. Every committed token tells whether one of the nodes proposed for its position was right, verified
or not, so a draft that was disbelieved and improves is believed again without a node being verified.
"""

from __future__ import annotations

DECAY = 0.95
"""What is left of the counts after one more position."""
PRIOR = 4.0
"""Positions, predicted and right, that a new draft is credited with."""


class Trust:
    """Ratio of right to predicted proposals for the next position, at most 1."""

    def __init__(self) -> None:
        self._predicted = 0.0
        self._right = 0.0

    @property
    def factor(self) -> float:
        """What a node's conditional acceptance estimate is multiplied by."""
        return min((self._right + PRIOR) / (self._predicted + PRIOR), 1.0)

    def observe(self, predicted: float, right: bool) -> None:
        """One of the proposals for a position was expected to be right with probability `predicted`."""
        self._predicted = DECAY * self._predicted + min(predicted, 1.0)
        self._right = DECAY * self._right + right
