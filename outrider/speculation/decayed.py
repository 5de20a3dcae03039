"""A running mean in which older values count less."""

from __future__ import annotations

WEIGHT = 0.2
"""Weight of the newest observation in the mean."""


class Decayed:
    """A decayed mean; None before the first observation."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> float:
        """Take one observation into account; return the mean."""
        self.value = value if self.value is None else self.value + WEIGHT * (value - self.value)
        return self.value
