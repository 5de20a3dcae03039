"""Describes a step's candidates for a caller who asked for that."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.messages import MAX_STEP_NODES, Origin, StepNodes
from outrider.speculation.candidate_tree import Node
from verify_service.speculation.forced_candidates import is_forced
from verify_service.speculation.lookup_candidates import from_draft
from verify_service.speculation.predicted_candidates import is_predicted


def step_nodes(nodes: Sequence[Node]) -> StepNodes:
    """The nodes of a step for the caller, parents before children, at most MAX_STEP_NODES."""
    told = nodes[:MAX_STEP_NODES]
    index_of = {node.id: index for index, node in enumerate(told)}
    return StepNodes(
        tuple(node.token for node in told),
        tuple(-1 if node.parent is None else index_of[node.parent.id] for node in told),
        tuple(map(origin_of, told)),
    )


def origin_of(node: Node) -> Origin:
    """Who proposed the node first."""
    if from_draft(node):
        return Origin.DRAFT
    if is_forced(node):
        return Origin.GRAMMAR
    return Origin.PREDICTION if is_predicted(node) else Origin.LOOKUP
