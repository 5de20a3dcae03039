"""Candidates where a grammar allows only one token: the target will choose it, whatever its logits are."""

from __future__ import annotations

from itertools import count

from outrider.grammar.matcher import Matcher
from outrider.speculation.candidate_tree import CandidateTree, Node
from verify_service.speculation.origins import FIRST_FORCED_ID

MAX_FORCED_NODES = 16
CERTAIN = 1.0


class ForcedCandidates:
    """The forced candidates of one session."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._ids = count(FIRST_FORCED_ID)
        self._found: set[int] = set()
        """Ids of this round's nodes."""

    def propose(self, tree: CandidateTree) -> None:
        """Add the chain of forced tokens below the last committed one. Nodes of it that exist already become
        certain."""
        self._found.clear()
        parent: Node | None = None
        siblings = tree.children
        for token in self._matcher.forced((), MAX_FORCED_NODES):
            node = siblings.get(token)
            if node is None:
                node = tree.add_child(next(self._ids), parent, token, CERTAIN)
            else:
                tree.raise_acceptance(node, CERTAIN)
            if node is None:  # the tree is full
                return
            self._found.add(node.id)
            parent, siblings = node, node.children

    def found(self, node: Node) -> bool:
        """True when the grammar allows only this node in this round, even if a draft proposed it."""
        return node.id in self._found
