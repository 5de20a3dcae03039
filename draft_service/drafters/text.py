"""The text of one sequence for drafters with a model: it ranks candidates, recalls earlier passages, and
applies the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draft_service.drafters.base import NOTHING, Candidate, CandidateSource, Expansion, Proposal
from draft_service.drafters.lookup import SequenceLookup
from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import OpenDraft, SamplingParams
from outrider.sampling.chooser import Ranking, SamplingRow, rank
from outrider.sampling.history import History, Path
from outrider.speculation.candidate_tree import Node, tokens_to

LOOKUP_NODES = 16
LOOKUP_DEPTH = 16
MAX_FORCED = 16
"""Most tokens of a chain that the grammar forces."""
SHORTEST_MATCH = 6
"""Shortest match of a lookup that is proposed, in tokens. Below it a model's own guess is better: in the
simulated loads, 3 makes 0.98 of the tokens per second, and 12 0.99."""


@dataclass(slots=True)
class DraftText:
    """All committed tokens of a sequence, and what depends on them."""

    params: SamplingParams
    prompt_length: int
    tokens: list[int]
    history: History
    lookup: SequenceLookup
    matcher: Matcher | None = None
    """The position of the text in its grammar; None: it has no grammar, or one that has become too costly."""

    @classmethod
    def opened(cls, request: OpenDraft) -> DraftText:
        """Return the text that a session begins with."""
        tokens = list(request.token_ids)
        history = History(tokens[: request.prompt_length], tokens[request.prompt_length :])
        return cls(request.sampling, request.prompt_length, tokens, history, SequenceLookup(tokens))

    def append(self, tokens: Sequence[int]) -> None:
        """Add committed tokens and advance the grammar; without the grammar's masks a draft is worse, not
        wrong."""
        self.tokens.extend(tokens)
        self.history.append(tokens)
        self.lookup.append(tokens)
        if self.matcher is None:
            return
        for token in tokens:
            self.matcher.advance(token)
        if self.matcher.settle():
            self.matcher = None

    def recall(self) -> Proposal:
        """Return what the grammar forces, otherwise what the lookup proposes if its match is long."""
        matcher = self.matcher
        if matcher is not None and (chain := forced(matcher, ())) is not None:
            return chain
        found = self.lookup.propose(LOOKUP_NODES, LOOKUP_DEPTH, SHORTEST_MATCH)
        return found if matcher is None else possible(matcher, found)

    def row(self, node: Node | None) -> SamplingRow:
        """Return what the choice of a child of `node` depends on; None is the last committed token."""
        position = len(self.tokens) + (node.depth if node is not None else 0)
        generated = position - self.prompt_length
        path = tokens_to(node) if self.params.penalised or self.matcher else ()
        history: History | Path = self.history
        if path and self.params.penalised:
            history = self.history.extended(path)
        mask = None if self.matcher is None else self.matcher.mask(path)
        return SamplingRow(self.params, position, generated, history, mask)

    def proposal(self, ranking: Ranking, node: Node | None) -> Proposal:
        """Return the ranked children, or those that the grammar forces; none where it allows none."""
        if self.matcher is not None:
            path = tokens_to(node)
            if not self.matcher.allows(path):
                return NOTHING
            if (chain := forced(self.matcher, path)) is not None:
                return chain
        candidates = [
            Candidate(token, CandidateSource.MODEL, bucket, place)
            for place, (token, bucket) in enumerate(zip(ranking.tokens, ranking.buckets, strict=True))
        ]
        return Proposal(candidates, ranking.winners)


def proposals_of(
    logits: Tensor, asked: Sequence[tuple[DraftText, Expansion]], children: int, eos_token_ids: Sequence[int]
) -> list[Proposal]:
    """Return for each expansion the best `children` by `logits` [asked, V], ranked with the noise."""
    rankings = rank(
        logits,
        [text.row(expansion.node) for text, expansion in asked],
        children,
        [expansion.sharpness for _, expansion in asked],
        eos_token_ids,
    )
    return [
        text.proposal(ranking, expansion.node)
        for (text, expansion), ranking in zip(asked, rankings, strict=True)
    ]


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
