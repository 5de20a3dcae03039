"""Candidates from a text that the caller predicted; they are added and learned from like those of the
lookup."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.acceptance import AcceptanceModel
from outrider.speculation.candidate_tree import CandidateTree, Node
from outrider.speculation.lookup import Proposed
from outrider.speculation.prediction import Prediction
from verify_service.speculation.lookup_candidates import LookupCandidates
from verify_service.speculation.origins import FIRST_PREDICTED_ID


class PredictedCandidates(LookupCandidates):
    """One session's prediction; `generated` are the tokens after the prompt so far.

    A replica that takes the session over finds the same place in the prediction from the same tokens.
    """

    def __init__(
        self,
        predicted: Sequence[int],
        generated: Sequence[int],
        acceptance: AcceptanceModel,
        task: str,
        max_nodes: int,
    ) -> None:
        super().__init__((), acceptance, task)
        self._source = Prediction(predicted, generated)
        self._next_id = FIRST_PREDICTED_ID
        self._max_nodes = max_nodes

    def _add(self, tree: CandidateTree, parent: Node | None, found: Proposed, estimate: float) -> Node | None:
        """As in the lookup; a node that a draft proposed too keeps the higher estimate."""
        node = super()._add(tree, parent, found, estimate)
        if node is not None:
            tree.raise_acceptance(node, estimate)
        return node
