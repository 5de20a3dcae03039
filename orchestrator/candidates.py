"""Checks the token blocks that a draft sends, and finds which of their nodes are still alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.protocol.allowance import BLOCKS, LATE, Allowance
from outrider.protocol.errors import Flood, InternalError, OutriderError
from outrider.protocol.messages import TokenBlock
from outrider.speculation.candidate_tree import CandidateTree, Node, first_id_of

MAX_LIVE_NODES = 1024
MAX_BLOCKS = LATE * BLOCKS
"""Most blocks that a verify replica takes at once."""


@dataclass(slots=True)
class BlockCheck:
    """What one draft stream may still send.

    Its node ids are in [next_id, end_id), a range that no other draft uses. `allowance` limits the blocks and
    nodes that it may send before the next verdict. Its tokens may be any: the verify service drops those that
    the target does not have, which a draft with a wider padded output layer may propose.
    """

    next_id: int
    end_id: int
    allowance: Allowance = field(default_factory=Allowance)

    @classmethod
    def of_draft(cls, number: int) -> BlockCheck:
        """The check of draft stream `number` of a session, counted from 0."""
        return cls(first_id_of(number), first_id_of(number + 1))

    def error_of(self, block: TokenBlock, committed_length: int) -> OutriderError | None:
        """Why a block cannot come from a sound draft; None when it can: it then uses up ids and allowance."""
        problem = self._problem_of(block, committed_length)
        if problem:
            return InternalError(f"draft replica: {problem}")
        if not self.allowance.spend(len(block)):
            return Flood("draft replica: more blocks or nodes than fit between two verdicts")
        return None

    def _problem_of(self, block: TokenBlock, committed_length: int) -> str:
        if not self.next_id <= block.first_id <= self.end_id - len(block):
            return f"node ids from {block.first_id} are not in [{self.next_id}, {self.end_id})"
        if block.base_length > committed_length:
            return f"block for length {block.base_length} where {committed_length} tokens are committed"
        self.next_id = block.first_id + len(block)
        return self._problem_of_nodes(block, committed_length) if block.tokens else ""

    def _problem_of_nodes(self, block: TokenBlock, committed_length: int) -> str:
        if min(block.parents) < -committed_length:
            return f"parent {min(block.parents)} where {committed_length} tokens are committed"
        if any(parent >= id for id, parent in enumerate(block.parents, block.first_id)):
            return "a parent that is not an earlier node"
        if min(block.acceptances) < 0.0 or max(block.acceptances) > 1.0:
            return "an acceptance that is not a probability"
        return ""


def without_dead(block: TokenBlock, committed: Sequence[int]) -> TokenBlock:
    """The block, or a copy without nodes when all of its nodes contradict the committed tokens.

    This looks only at the block itself; the verify replica drops other dead nodes.
    """
    length, dead = len(committed), set[int]()
    for id, (parent, token) in enumerate(zip(block.parents, block.tokens, strict=True), block.first_id):
        if parent not in dead and not (-length < parent < 0 and committed[-parent] != token):
            return block
        dead.add(id)
    ready = block.ready and block.base_length == length
    return replace(block, parents=(), tokens=(), acceptances=(), ready=ready)


def live_blocks(committed: list[int], recent: Iterable[TokenBlock], ready: bool) -> list[TokenBlock]:
    """The nodes of `recent` below the last committed token, as blocks in which nodes keep their ids. They are
    at most as many as a verify replica that has just opened takes.

    When `ready` is set, the last block is marked ready; if no node is alive, it is a block without nodes.
    """
    tree = CandidateTree(committed, MAX_LIVE_NODES)
    latest = None
    for latest in recent:
        tree.add(latest)
    nodes = sorted(tree.nodes(), key=lambda node: node.id)
    blocks = [_block(run, len(committed)) for run in _runs(nodes)[:MAX_BLOCKS]]
    if latest is not None and blocks:
        blocks[-1] = replace(blocks[-1], traceparent=latest.traceparent)
    if ready and not blocks:
        return [empty_ready(len(committed))]
    if ready:
        blocks[-1] = replace(blocks[-1], ready=True)
    return blocks


def empty_ready(committed_length: int) -> TokenBlock:
    """A block without nodes that is marked ready."""
    return TokenBlock(0, (), (), (), ready=True, base_length=committed_length)


def _runs(nodes: list[Node]) -> list[list[Node]]:
    """Nodes grouped by consecutive ids."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and runs[-1][-1].id + 1 == node.id:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _block(nodes: list[Node], committed_length: int) -> TokenBlock:
    return TokenBlock(
        nodes[0].id,
        tuple(-committed_length if node.parent is None else node.parent.id for node in nodes),
        tuple(node.token for node in nodes),
        tuple(node.acceptance for node in nodes),
        base_length=committed_length,
    )
