"""How much may be sent between two verdicts of a session: what a sound draft keeps to, what the orchestrator
takes from a draft, and what a verify replica takes from an orchestrator.

Every verdict gives new room, and so does the opening. Room that was not used is kept for `LATE` verdicts:
blocks of several rounds may arrive together when the way was blocked.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TREE_NODES = 512
"""Most live nodes of a draft's tree for one session."""
BLOCKS = 32
"""Blocks between two verdicts. A draft sends about eight in a round as long as it expected; with this many
sent, nodes wait for the next verdict."""
NODES = 2 * MAX_TREE_NODES
"""Nodes between two verdicts: a tree that waited to be sent when the verdict came, and a new one."""
LATE = 8
"""Verdicts whose room may be used at once."""

MAX_FEATURE_LAYERS = 8
"""Layers of a target whose features a session may ask for."""
MAX_FEATURE_BYTES = 4 << 20
"""Features of one verdict, and of the end of a text when it is opened; rows before are left out. A row of
three layers of width 4,096 has 24 KiB."""
FEATURE_BYTES = 2
"""Bytes of one number of a feature."""


def row_bytes(layers: int, width: int) -> int:
    """Bytes of a row of features: so many layers of a width."""
    return layers * width * FEATURE_BYTES


@dataclass(slots=True)
class Allowance:
    """What one side of a session may still send; a new one has the room of the opening."""

    blocks: int = BLOCKS
    nodes: int = NODES

    @classmethod
    def full(cls) -> Allowance:
        """All the room there can be: for a side that does not know what was saved up before."""
        return cls(LATE * BLOCKS, LATE * NODES)

    def spend(self, nodes: int) -> bool:
        """Take room for a block of so many nodes; False when there is none, and nothing is taken."""
        if self.blocks < 1 or self.nodes < nodes:
            return False
        self.blocks -= 1
        self.nodes -= nodes
        return True

    def refill(self) -> None:
        """A verdict was sent or came."""
        self.blocks = min(self.blocks + BLOCKS, LATE * BLOCKS)
        self.nodes = min(self.nodes + NODES, LATE * NODES)
