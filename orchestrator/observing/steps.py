"""What one verify step did, for callers who asked for it: candidates, times, where its tokens came from.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.observing.timeline import StepRecord, TimelineEvent
from outrider.protocol.messages import Origin, StepNodes

NO_NODES = StepNodes((), (), ())


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step of one continuation."""

    number: int
    nodes: StepNodes
    accepted: tuple[int, ...]
    """Indices of the committed nodes, in order."""
    origins: tuple[Origin, ...]
    """One per committed token."""
    bonus: int | None
    """The token that the target chose after the accepted nodes; None where the text ended at one of them."""
    events: tuple[TimelineEvent, ...]


def step_of(record: StepRecord) -> Step:
    """What the verdict of a step tells, with the step's times."""
    verdict = record.verdict
    nodes = verdict.nodes or NO_NODES
    accepted = _accepted(nodes, verdict.tokens[: verdict.accepted])
    own = len(verdict.tokens) - len(accepted)
    return Step(
        verdict.step,
        nodes,
        accepted,
        (*(nodes.origins[index] for index in accepted), *[Origin.TARGET] * own),
        verdict.tokens[-1] if own else None,
        record.events,
    )


def _accepted(nodes: StepNodes, tokens: Sequence[int]) -> tuple[int, ...]:
    """The path of nodes with these tokens, as far as there are nodes for it."""
    index_of = {key: index for index, key in enumerate(zip(nodes.parents, nodes.tokens, strict=True))}
    path: list[int] = []
    for token in tokens:
        index = index_of.get((path[-1] if path else -1, token))
        if index is None:
            break
        path.append(index)
    return tuple(path)
