"""Measures how far a draft's acceptance estimates can be believed.

A draft calibrates its own estimates. This guards the target's budget against a draft that does it badly, or
lies. Every committed token shows whether a node proposed for its position was right, verified or not. So a
draft that improves is trusted again even while none of its nodes are verified.
"""

from __future__ import annotations

DECAY = 0.95
"""Share of the counts that remains at each further position."""
PRIOR = 4.0
"""Positions at which a new draft is assumed to have been right."""


class Trust:
    """The ratio of right proposals for the next position to the predicted number of right ones, at most 1."""

    def __init__(self) -> None:
        self._predicted = 0.0
        self._right = 0.0

    @property
    def factor(self) -> float:
        """The factor, at most 1, for the acceptance estimates of the draft's nodes."""
        return min((self._right + PRIOR) / (self._predicted + PRIOR), 1.0)

    def observe(self, predicted: float, right: bool) -> None:
        """Note one position, at which the proposals were expected to be right with probability `predicted`;
        `right`: one of them was."""
        self._predicted = DECAY * self._predicted + min(predicted, 1.0)
        self._right = DECAY * self._right + right
