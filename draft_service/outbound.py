"""The nodes of one session that wait to be sent, and when a block may go out. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Collection

from outrider.protocol.allowance import BLOCKS
from outrider.protocol.messages import TokenBlock, Verdict
from outrider.speculation.candidate_tree import Node

BLOCK_GAP = 0.15
"""Shortest time between two blocks of a session, as a share of a step's time, multiplied by the sessions in
the step. Each block takes time from the target, so nodes are sent together."""


class Outbound:
    """Collects new nodes, whose ids are consecutive, until a block takes them."""

    def __init__(self, first_node_id: int) -> None:
        self.nodes: list[Node] = []
        """The nodes that are not sent yet."""
        self.next_id = first_node_id
        """Id of the next new node."""
        self.ready_sent = False
        """True if a ready block went out since the last verdict."""
        self._parents: list[int] = []
        self._blocks = 0
        """Number of blocks sent since the last verdict."""
        self._send_at = 0.0
        self._gap = 0.0

    @property
    def first_id(self) -> int:
        """The first unsent id: nodes with smaller ids have been sent."""
        return self.nodes[0].id if self.nodes else self.next_id

    @property
    def begun(self) -> bool:
        """True if a block went out since the last verdict."""
        return self._blocks > 0

    @property
    def spent(self) -> bool:
        """True if only one more block may go out before the next verdict: the one marked ready."""
        return self._blocks >= BLOCKS - 1

    def due(self, now: float) -> bool:
        """True when it is time to send a block even if the verify side does not wait."""
        return now >= self._send_at

    def add(self, node: Node, parent: int) -> None:
        """Add a new node, with the next id; `parent` is as in `TokenBlock.parents`."""
        self.next_id += 1
        self.nodes.append(node)
        self._parents.append(parent)

    def verdict(self, verdict: Verdict, now: float) -> None:
        """Take a verdict into account: blocks then go out at times that suit its next step."""
        self._gap = BLOCK_GAP * verdict.batch_size * verdict.next_step_micros * 1e-6
        self._send_at = now + self._gap
        self._blocks = 0
        self.ready_sent = False

    def drop(self, dropped: Collection[int]) -> None:
        """Forget the unsent nodes if a commit has dropped all of them."""
        if all(node.id in dropped for node in self.nodes):
            self.nodes, self._parents = [], []

    def take(self, ready: bool, base_length: int, now: float) -> TokenBlock:
        """Return the unsent nodes as a block, sent at `now`. A block that only says ready may have no
        nodes."""
        self._blocks += 1
        self._send_at = max(self._send_at, now + self._gap)
        self.ready_sent = self.ready_sent or ready
        block = TokenBlock(
            first_id=self.first_id,
            parents=tuple(self._parents),
            tokens=tuple(node.token for node in self.nodes),
            acceptances=tuple(node.acceptance for node in self.nodes),
            ready=ready,
            base_length=base_length,
        )
        self.nodes, self._parents = [], []
        return block
