"""The candidate tree: proposed tokens below the last committed one.

Both sides of the wire have a tree, and re-root it only by the committed tokens, so a block that crosses a
verdict on the way is still added at the right place. A parent resolves to one of three things:

    a committed position    the child is compared with the committed token at that position: if equal,
                            the child resolves to that position too; if different, it is dropped
    a live node             the child becomes a node below it
    nothing                 the parent was dropped, is unknown or malformed: the child is dropped
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.protocol.messages import TokenBlock

MAX_ALIASES = 4096
"""Most ids of committed or dropped nodes that are remembered; older ids resolve to nothing."""

FIRST_OWN_ID = 2**62
"""Ids of nodes from here on belong to the verify side's own candidates."""
_DRAFT_BITS = 40
"""Lower bits of a node id, which number the nodes of one draft stream; the higher ones number the stream."""


def first_id_of(draft: int) -> int:
    """The first node id of a session's draft stream; `draft` numbers its streams from 0."""
    return draft << _DRAFT_BITS


def draft_of(id: int) -> int:
    """The number of the draft stream that a node id belongs to; ids of the verify side have higher ones."""
    return id >> _DRAFT_BITS


@dataclass(slots=True, eq=False)
class Node:
    """One proposed token. `reach` is the estimated probability that the target's walk arrives here."""

    id: int
    token: int
    parent: Node | None
    acceptance: float
    reach: float
    depth: int
    """1 for a child of the last committed token."""
    children: dict[int, Node] = field(default_factory=dict)
    """Children by token; a token is proposed at most once below a node."""
    claims: dict[int, float] | None = None
    """Estimates by the number of the draft, if several drafts proposed the node; else None."""

    @property
    def estimates(self) -> dict[int, float]:
        """Estimates by the number of the draft; the verify side counts as a draft here."""
        return self.claims or {draft_of(self.id): self.acceptance}

    def path(self) -> list[Node]:
        """The nodes from the child of the last committed token down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def tokens_to(node: Node | None) -> tuple[int, ...]:
    """The tokens from the last committed one, not included, down to a node."""
    return () if node is None else tuple([step.token for step in node.path()])


@dataclass(frozen=True, slots=True)
class Added:
    """What became of the nodes of a block."""

    nodes: list[Node]
    """New live nodes."""
    stale: int
    """Number of nodes that contradict committed tokens or are below a dropped node."""
    known: int
    """Number of nodes that were in the tree already or are committed."""


@dataclass(frozen=True, slots=True)
class Rerooted:
    """What a commit changed in the tree."""

    walked: list[Node]
    """Nodes that became committed, in order."""
    dropped: list[Node]
    """Nodes that contradict the committed tokens."""


class CandidateTree:
    """Nodes below `committed_length` tokens, bounded by `max_nodes`.

    Invariants: every live node's path leads to the last committed token; children of a node have
    different tokens; `len(tree)` never exceeds `max_nodes`, and a draft has at most `max_per_draft` of them
    (further nodes are dropped as stale).
    """

    def __init__(self, committed: list[int], max_nodes: int) -> None:
        self.committed = list(committed)
        self.max_nodes = max_nodes
        self.max_per_draft = max_nodes
        self.children: dict[int, Node] = {}
        """Candidates for the next position, by token."""
        self._live: dict[int, Node] = {}
        self._aliases: OrderedDict[int, int | Node] = OrderedDict()
        self._raised = False
        """True when an estimate was raised and the reach of the nodes below it is not up to date."""
        self._counts: dict[int, int] = {}
        """Number of live nodes by draft."""

    def __len__(self) -> int:
        return len(self._live)

    @property
    def committed_length(self) -> int:
        """Number of committed tokens."""
        return len(self.committed)

    def nodes(self) -> Iterator[Node]:
        """All live nodes, parents before children, best child first."""
        stack = sorted(self.children.values(), key=_reach)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(sorted(node.children.values(), key=_reach))

    def add(self, block: TokenBlock) -> Added:
        """Add a block's nodes below what their parents resolve to; stale nodes are counted, not an error."""
        nodes: list[Node] = []
        stale = known = 0
        for offset, (parent, token, acceptance) in enumerate(
            zip(block.parents, block.tokens, block.acceptances, strict=True)
        ):
            placed = self._place(block.first_id + offset, parent, token, acceptance)
            if isinstance(placed, Node):
                nodes.append(placed)
            elif placed:
                known += 1
            else:
                stale += 1
        if self._raised:  # once for the block, which may raise one node many times
            self._raised = False
            for child in self.children.values():
                _update_reach(child)
        return Added(nodes, stale, known)

    def add_child(self, id: int, parent: Node | None, token: int, acceptance: float) -> Node | None:
        """Add one node below `parent` (None: the last committed token). Returns None if the token is there
        already, or there is no room."""
        siblings = self.children if parent is None else parent.children
        if token in siblings or len(self) >= self.max_nodes or id in self._live:
            return None
        draft = draft_of(id)
        count = self._counts.get(draft, 0)
        if count >= self.max_per_draft:
            return None
        self._counts[draft] = count + 1
        reach = _reach_below(parent) * acceptance
        depth = 1 if parent is None else parent.depth + 1
        node = Node(id, token, parent, acceptance, reach, depth)
        siblings[token] = node
        self._live[id] = node
        return node

    def raise_acceptance(self, node: Node, acceptance: float) -> None:
        """Raise a node's estimate if it was proposed again with a higher one."""
        if acceptance > node.acceptance:
            node.acceptance = acceptance
            _update_reach(node)

    def commit(self, tokens: list[int]) -> Rerooted:
        """Append committed tokens and re-root below the last of them."""
        walked: list[Node] = []
        dropped: list[Node] = []
        level = self.children
        for token in tokens:
            node = level.pop(token, None)
            for loser in level.values():
                dropped.extend(_subtree(loser))
            level = node.children if node is not None else {}
            if node is not None:
                walked.append(node)
        first = self.committed_length + 1
        self.committed.extend(tokens)
        self.children = level
        self._forget(walked, dropped, first)
        self._lift(walked)
        return Rerooted(walked, dropped)

    def _place(self, id: int, parent: int, token: int, acceptance: float) -> Node | bool:
        """The new node; True if it is known already, False if it is stale."""
        where = self._resolve(parent)
        if where is None or id in self._live:
            return False
        if isinstance(where, int) and where < self.committed_length:
            if self.committed[where] != token:
                return False
            self._alias(id, where + 1)
            return True
        node = where if isinstance(where, Node) else None
        siblings = self.children if node is None else node.children
        acceptance = min(max(acceptance, 0.0), 1.0)
        if token in siblings:
            known = siblings[token]
            self._alias(id, known)
            _claim(known, id, acceptance)
            if acceptance > known.acceptance:
                known.acceptance, self._raised = acceptance, True
            return True
        return self.add_child(id, node, token, acceptance) or False

    def _resolve(self, parent: int) -> int | Node | None:
        """What a parent stands for: a committed length, a live node, or None for nothing."""
        if parent < 0:
            return -parent if -parent <= self.committed_length else None
        node = self._live.get(parent)
        if node is not None:
            return node
        alias = self._aliases.get(parent)
        if not isinstance(alias, Node) or self._live.get(alias.id) is alias:
            return alias
        length = self._aliases.get(alias.id)  # the node is committed or dropped by now
        return None if isinstance(length, Node) else length

    def _alias(self, id: int, target: int | Node) -> None:
        self._aliases[id] = target
        if len(self._aliases) > MAX_ALIASES:
            self._aliases.popitem(last=False)

    def _forget(self, walked: list[Node], dropped: list[Node], first_length: int) -> None:
        for node in dropped:
            self._unlist(node)
        for length, node in enumerate(walked, first_length):
            self._unlist(node)
            self._alias(node.id, length)

    def _unlist(self, node: Node) -> None:
        del self._live[node.id]
        self._counts[draft_of(node.id)] -= 1

    def _lift(self, walked: list[Node]) -> None:
        """Make the surviving nodes' depth and reach relative to the new last committed token."""
        shift = len(walked)
        for child in self.children.values():
            child.parent = None
            for node in _subtree(child):
                node.depth -= shift
                node.reach = _reach_below(node.parent) * node.acceptance


def _claim(node: Node, id: int, acceptance: float) -> None:
    """Remember the estimate of another draft that also proposed the node."""
    draft = draft_of(id)
    if node.claims is None:
        if draft == draft_of(node.id):
            return
        node.claims = node.estimates
    node.claims[draft] = max(acceptance, node.claims.get(draft, 0.0))


def _reach(node: Node) -> float:
    return node.reach


def _reach_below(parent: Node | None) -> float:
    """The reach that a certain child of a parent has; None stands for the last committed token."""
    return 1.0 if parent is None else parent.reach


def _update_reach(root: Node) -> None:
    for node in _subtree(root):
        node.reach = _reach_below(node.parent) * node.acceptance


def _subtree(root: Node) -> list[Node]:
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes
