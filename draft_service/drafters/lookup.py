"""Drafts without a model: proposes what followed the longest earlier occurrences of the sequence's end."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import NOTHING, Candidate, CandidateSource, Expansion, PageCounts, Proposal
from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import OpenDraft
from outrider.speculation.acceptance import lookup_bucket
from outrider.speculation.candidate_tree import Rerooted
from outrider.speculation.lookup import GradualLookup, Proposed

MAX_VOCABULARY = 2**31
"""Bound of token ids if no tokenizer sets one."""


class SequenceLookup:
    """The lookup in one sequence, as proposals."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._lookup = GradualLookup(tokens)
        self.append, self.index = self._lookup.append, self._lookup.index

    def propose(self, max_nodes: int, max_depth: int, shortest: int = 0) -> Proposal:
        """Return what followed earlier; nothing if the best match is below `shortest`, or while tokens wait
        to be indexed."""
        proposed = self._lookup.propose(max_nodes, max_depth)
        if not proposed or proposed[0].match_length < shortest:
            return NOTHING
        return Proposal([_candidate(place) for place in proposed])


class LookupDrafter:
    """Proposes by prompt lookup; there is nothing to expand."""

    kind = "lookup"
    expands = False
    context_length = MAX_VOCABULARY

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes = max_nodes
        self._max_depth = max_depth
        self._recalls: dict[int, SequenceLookup] = {}

    def open(self, key: int, request: OpenDraft) -> int:
        """See Drafter; no token needs computing."""
        self._recalls[key] = SequenceLookup(request.token_ids)
        return len(request.token_ids)

    def constrain(self, key: int, matcher: Matcher) -> None:
        """See Drafter; the verify side drops what the grammar does not allow."""

    def recall(self, key: int) -> Proposal:
        """See Drafter."""
        return self._recalls[key].propose(self.max_nodes, self._max_depth)

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """See Drafter; there are no forwards here."""
        return [NOTHING for _ in expansions]

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """See Drafter."""
        self._recalls[key].append(tokens)

    def fits(self, key: int) -> bool:
        """See Drafter; there is no memory to run out of."""
        return True

    def reset(self, key: int) -> None:
        """See Drafter; there is nothing to give back."""

    def close(self, key: int) -> None:
        """See Drafter."""
        del self._recalls[key]

    def pages(self) -> PageCounts:
        """See Drafter."""
        return PageCounts()


def _candidate(place: Proposed) -> Candidate:
    return Candidate(
        place.token, CandidateSource.LOOKUP, lookup_bucket(place.match_length), place.rank, place.parent
    )
