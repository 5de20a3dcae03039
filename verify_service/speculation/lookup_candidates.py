"""Candidates that the verify service finds by itself: what followed earlier occurrences of the text.

They need no round trip, so the next step has candidates after a miss, and without a draft. The probability
that a match is right is learned from the committed tokens, whether the match was verified or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.acceptance import AcceptanceModel, lookup_bucket
from outrider.speculation.candidate_tree import CandidateTree, Node
from outrider.speculation.lookup import GradualLookup, Proposed
from outrider.speculation.prediction import Prediction
from verify_service.speculation.origins import FIRST_LOOKUP_ID, FIRST_PREDICTED_ID

MAX_LOOKUP_NODES = 16


class LookupCandidates:
    """One session's lookup; the acceptance model is shared by all sessions."""

    first_id = FIRST_LOOKUP_ID

    def __init__(
        self,
        source: GradualLookup | Prediction,
        acceptance: AcceptanceModel,
        task: str,
        max_nodes: int = MAX_LOOKUP_NODES,
    ) -> None:
        self._source = source
        self._max_nodes = max_nodes
        self._acceptance = acceptance
        self._task = task
        self._next_id = self.first_id
        self._features: dict[int, tuple[int, int]] = {}
        """(bucket, rank) of this round's nodes by id."""

    def propose(self, tree: CandidateTree, min_reach: float = 0.0) -> None:
        """Add the nodes that the lookup finds below the last committed token and whose reach is at least
        `min_reach`."""
        self._features.clear()
        kept: list[tuple[float, float]] = []
        """Estimate and reach of each token that is proposed."""

        def keep(parent: int, match_length: int, rank: int) -> bool:
            estimate = self._acceptance.estimate(lookup_bucket(match_length), rank, self._task)
            reach = estimate * (kept[parent][1] if parent >= 0 else 1.0)
            if reach >= min_reach:
                kept.append((estimate, reach))
            return reach >= min_reach

        nodes: list[Node | None] = []
        for found in self._source.propose(self._max_nodes, keep=keep):
            parent = nodes[found.parent] if found.parent >= 0 else None
            missing = found.parent >= 0 and parent is None
            estimate, _ = kept[len(nodes)]
            nodes.append(None if missing else self._add(tree, parent, found, estimate))

    def learn(self, tree: CandidateTree, tokens: Sequence[int]) -> None:
        """Learn which nodes the target's walk reached, and which it took. Call it before `tokens` are
        committed to the tree."""
        children = tree.children
        for token in tokens:
            for child in children.values():
                if child.id in self._features:
                    bucket, rank = self._features[child.id]
                    self._acceptance.observe(bucket, rank, child.token == token, self._task)
            if token not in children:
                return
            children = children[token].children

    def found(self, node: Node) -> bool:
        """True when the lookup proposed this node in this round, even if a draft did too."""
        return node.id in self._features

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens to the text."""
        self._source.append(tokens)

    def _add(self, tree: CandidateTree, parent: Node | None, found: Proposed, estimate: float) -> Node | None:
        """Return the node of a found token, new or existing; None if the tree is full."""
        siblings = tree.children if parent is None else parent.children
        node = siblings.get(found.token)
        if node is None:
            node = tree.add_child(self._next_id, parent, found.token, estimate)
            self._next_id += 1
        if node is not None:
            self._features[node.id] = (lookup_bucket(found.match_length), found.rank)
        return node


class PredictedCandidates(LookupCandidates):
    """One session's prediction. A replica that takes the session over finds the same place in the prediction
    from the same tokens."""

    first_id = FIRST_PREDICTED_ID

    def _add(self, tree: CandidateTree, parent: Node | None, found: Proposed, estimate: float) -> Node | None:
        """As in the lookup; a node that a draft proposed too keeps the higher estimate."""
        node = super()._add(tree, parent, found, estimate)
        if node is not None:
            tree.raise_acceptance(node, estimate)
        return node
