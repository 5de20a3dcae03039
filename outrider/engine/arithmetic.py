"""Arithmetic in which a token's bits do not depend on its batch.

    linear layers    in blocks of rows whose kernels agree
    attention        likewise, over blocks of keys by position, added up in order
    elementwise      padded so that no vectorized loop ends in single elements, which it computes differently

Which sizes those are depends on processor, library and model: `outrider.engine.probes` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.row_blocks import RowBlocks

KEYS_PER_BLOCK = 64
"""Keys that one attention product sums over; blocks are cut by position."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a forward keeps to so that results do not depend on the batch."""

    linear: RowBlocks
    attention: RowBlocks
    unit: int
    """Token counts are padded to a multiple of it."""

    def padded(self, tokens: int) -> int:
        """How many packed tokens `tokens` are padded to."""
        blocks = self.linear.padded(max(tokens, 1))
        return -(-blocks // self.unit) * self.unit
