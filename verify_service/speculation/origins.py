"""Tells from a node's id who proposed it first. A draft's ids end where those of the verify service begin."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.messages import MAX_STEP_NODES, Origin, StepNodes
from outrider.speculation.candidate_tree import FIRST_OWN_ID, Node

FIRST_LOOKUP_ID = FIRST_OWN_ID
FIRST_FORCED_ID = FIRST_LOOKUP_ID + 2**60
FIRST_PREDICTED_ID = FIRST_LOOKUP_ID + 2**61


def from_draft(node: Node) -> bool:
    """True when a draft proposed the node first."""
    return node.id < FIRST_LOOKUP_ID


def origin_of(node: Node) -> Origin:
    """Return who proposed the node first."""
    if node.id >= FIRST_PREDICTED_ID:
        return Origin.PREDICTION
    if node.id >= FIRST_FORCED_ID:
        return Origin.GRAMMAR
    return Origin.DRAFT if from_draft(node) else Origin.LOOKUP


def step_nodes(nodes: Sequence[Node]) -> StepNodes:
    """Return a step's nodes for a caller who asked for them, parents before children; at most
    MAX_STEP_NODES."""
    shown = nodes[:MAX_STEP_NODES]
    index_of = {node.id: index for index, node in enumerate(shown)}
    return StepNodes(
        tuple(node.token for node in shown),
        tuple(-1 if node.parent is None else index_of[node.parent.id] for node in shown),
        tuple(map(origin_of, shown)),
    )
