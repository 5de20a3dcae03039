"""Limits on what may be sent between two verdicts of a session. A correct draft keeps to them, the
orchestrator enforces them on drafts, and a verify replica on orchestrators.

The opening and every verdict add room. Unused room is kept for `LATE` verdicts, because blocks of several
rounds may arrive together after a delay.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TREE_NODES = 512
"""Most live nodes of a draft's tree for one session."""
BLOCKS = 32
"""Most blocks between two verdicts. A draft sends about eight in a round of the expected length; after this
many, nodes wait for the next verdict."""
NODES = 2 * MAX_TREE_NODES
"""Most nodes between two verdicts: a tree that was still unsent when the verdict came, and a new one."""
LATE = 8
"""Number of verdicts whose room may be used at once."""

MAX_FEATURE_LAYERS = 8
"""Most layers of a target whose features a session may ask for."""
MAX_FEATURE_BYTES = 4 << 20
"""Most bytes of features in one verdict, and in the opening of a session; of a longer text, only the last
rows are sent. A row of three layers of width 4,096 has 24 KiB."""
FEATURE_BYTES = 2
"""Bytes of one number of a feature."""


def row_bytes(layers: int, width: int) -> int:
    """Bytes of a row of features of `layers` layers, each of `width` numbers."""
    return layers * width * FEATURE_BYTES


@dataclass(slots=True)
class Allowance:
    """What one side of a session may still send. A new allowance has the room of the opening."""

    blocks: int = BLOCKS
    nodes: int = NODES

    @classmethod
    def full(cls) -> Allowance:
        """The largest possible room, for a side that does not know how much was saved up before."""
        return cls(LATE * BLOCKS, LATE * NODES)

    def spend(self, nodes: int) -> bool:
        """Take room for a block of `nodes` nodes; returns False and takes nothing if there is too little."""
        if self.blocks < 1 or self.nodes < nodes:
            return False
        self.blocks -= 1
        self.nodes -= nodes
        return True

    def refill(self) -> None:
        """Add the room of one verdict that was sent or received."""
        self.blocks = min(self.blocks + BLOCKS, LATE * BLOCKS)
        self.nodes = min(self.nodes + NODES, LATE * NODES)
