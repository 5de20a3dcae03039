"""Applies a grammar to a drafter's proposals: removes what it forbids, adds what it forces."""

from __future__ import annotations

from draft_service.drafters.base import Candidate, CandidateSource, Proposal
from outrider.grammar.matcher import Matcher

MAX_FORCED = 16
"""Most tokens of a chain that the grammar forces."""


def forced(matcher: Matcher, path: tuple[int, ...]) -> Proposal | None:
    """Return the chain after a path that the grammar forces; None where it leaves a choice."""
    tokens = matcher.forced(path, MAX_FORCED)
    chain = [Candidate(token, CandidateSource.GRAMMAR, 0, 0, place - 1) for place, token in enumerate(tokens)]
    return Proposal(chain) if chain else None


def possible(matcher: Matcher, proposal: Proposal) -> Proposal:
    """Return the candidates below the last committed token that the grammar allows."""
    kept: list[Candidate] = []
    paths: list[tuple[int, ...]] = []
    places: dict[int, int] = {}
    """Index among the kept candidates, by index in the proposal."""
    for index, candidate in enumerate(proposal.candidates):
        parent = places.get(candidate.parent, -1)
        if candidate.parent >= 0 and parent < 0:
            continue
        path = (*(paths[parent] if parent >= 0 else ()), candidate.token)
        if matcher.allows(path):
            places[index] = len(kept)
            kept.append(candidate._replace(parent=parent))
            paths.append(path)
    return Proposal(kept, proposal.winners)
