"""The draft model as the draft service's code sees it: guesses come from the script, times from a table.

On the script's path it proposes the recorded guess, with the target's token in its recorded place. Off the
path it proposes guesses of other positions, because a real draft that has gone astray is just as sure of
itself. Lookup runs as it does in the service, over the session's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from draft_service.drafters.base import Candidate, CandidateSource, Expansion, PageCounts, Proposal
from draft_service.drafters.lookup import LookupDrafter, SequenceLookup
from draft_service.drafters.text import LOOKUP_DEPTH, LOOKUP_NODES, SHORTEST_MATCH
from draft_service.scheduler import PREFILL_CHUNK
from outrider.config import DraftConfig
from outrider.grammar.matcher import Matcher
from outrider.protocol.allowance import MAX_TREE_NODES
from outrider.protocol.messages import OpenDraft
from outrider.speculation.candidate_tree import Node, Rerooted
from simulator.devices import Place, StepTotals, work
from simulator.profile import DraftTimes
from simulator.traces import NO_RANK, Corpus, Guess, Script


@dataclass(slots=True)
class _Sequence:
    script: Script
    tokens: list[int]
    recall: SequenceLookup
    computed: int = 0
    """Number of tokens with keys and values."""
    expanded: set[int] = field(default_factory=set)
    """Ids of the nodes with keys and values."""


class ScriptedDrafter:
    """Stands in for `ModelDrafter`; `scripts` are texts by session number, made from `corpus`."""

    kind = "model"
    expands = True
    max_nodes = MAX_TREE_NODES

    def __init__(
        self,
        place: Place,
        times: DraftTimes,
        scripts: Mapping[int, Script],
        corpus: Corpus,
        context_length: int,
    ) -> None:
        self.context_length = context_length
        self.totals = StepTotals()
        self._place = place
        self._times = times
        self._scripts = scripts
        self._vocabulary_size = corpus.vocabulary_size
        self._astray = corpus.guesses
        self._sequences: dict[int, _Sequence] = {}

    def open(self, key: int, request: OpenDraft) -> int:
        """See Drafter; nothing is cached."""
        high, low = request.token_ids[:2]
        script = self._scripts[high * self._vocabulary_size + low]
        self._sequences[key] = _Sequence(script, list(request.token_ids), SequenceLookup(request.token_ids))
        return 0

    def constrain(self, key: int, matcher: Matcher) -> None:
        """See Drafter; simulated texts have no grammar."""

    def recall(self, key: int) -> Proposal:
        """See Drafter."""
        return self._sequences[key].recall.propose(LOOKUP_NODES, LOOKUP_DEPTH, SHORTEST_MATCH)

    def expand(self, expansions: Sequence[Expansion]) -> list[Proposal | None]:
        """See Drafter. The step's time passes, then the guesses are returned."""
        tokens = self._feed(expansions)
        sessions = len({expansion.key for expansion in expansions})
        seconds = self._times.forward(tokens, sessions)
        self.totals.add(len(expansions), sessions, seconds)
        work(self._place.core, self._times.step)
        work(self._place.device, seconds)
        return [self._proposal(expansion) for expansion in expansions]

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """See Drafter. Walked nodes that were computed need not be computed again."""
        work(self._place.core, self._times.verdict)
        sequence = self._sequences[key]
        if sequence.computed == len(sequence.tokens):
            kept = sum(node.id in sequence.expanded for node in rerooted.walked)
            sequence.computed += min(kept, len(tokens))
        sequence.tokens.extend(tokens)
        sequence.recall.append(tokens)
        sequence.expanded.difference_update(node.id for node in (*rerooted.walked, *rerooted.dropped))

    def fits(self, key: int) -> bool:
        """See Drafter; memory is not simulated on the draft's side."""
        return True

    def reset(self, key: int) -> None:
        """See Drafter."""
        sequence = self._sequences[key]
        sequence.computed = 0
        sequence.expanded.clear()

    def close(self, key: int) -> None:
        """See Drafter."""
        del self._sequences[key]

    def pages(self) -> PageCounts:
        """See Drafter."""
        return PageCounts()

    def _feed(self, expansions: Sequence[Expansion]) -> int:
        """Number of tokens of the forward: expanded nodes, and committed tokens that are not computed yet."""
        tokens, budget = 0, PREFILL_CHUNK
        for expansion in expansions:
            sequence = self._sequences[expansion.key]
            tail = min(len(sequence.tokens) - sequence.computed, budget)
            if tail:
                sequence.computed += tail
                budget -= tail
                tokens += tail
                sequence.recall.index()
            elif expansion.node is None:
                tokens += 1
            if expansion.node is not None:
                sequence.expanded.add(expansion.node.id)
                tokens += 1
        return tokens

    def _proposal(self, expansion: Expansion) -> Proposal | None:
        sequence = self._sequences[expansion.key]
        if sequence.computed < len(sequence.tokens):
            return None
        position = len(sequence.tokens) + (expansion.node.depth if expansion.node is not None else 0)
        guess = sequence.script.guess_at(position) if _on_script(sequence, expansion.node) else None
        if guess is not None:
            return self._candidates(guess, sequence.script.tokens[position], position)
        random = Random(hash((sequence.script.number, position, expansion.node.id if expansion.node else 0)))
        return self._candidates(random.choice(self._astray), None, random.randrange(self._vocabulary_size))

    def _candidates(self, guess: Guess, right: int | None, salt: int) -> Proposal:
        """The candidates of a guess: the right token in its place, and wrong tokens in the others."""
        size = self._vocabulary_size
        base = right if right is not None else salt
        tokens = [(base + 1 + 7 * salt + 131 * place) % size for place in range(len(guess.buckets))]
        if right is not None:
            tokens = [token if token != right else (token + 1) % size for token in tokens]
            if guess.rank < NO_RANK:
                tokens[guess.rank] = right
        return Proposal(
            [
                Candidate(token, CandidateSource.MODEL, bucket, place)
                for place, (token, bucket) in enumerate(zip(tokens, guess.buckets, strict=True))
            ]
        )


class TimedLookup(LookupDrafter):
    """The service's own drafter without a model, except that taking in a verdict takes time."""

    def __init__(self, place: Place, times: DraftTimes, config: DraftConfig) -> None:
        super().__init__(config.max_nodes, config.max_depth)
        self.totals = StepTotals()
        self._place = place
        self._times = times

    def commit(self, key: int, tokens: Sequence[int], rerooted: Rerooted) -> None:
        """See Drafter."""
        work(self._place.core, self._times.verdict)
        super().commit(key, tokens, rerooted)


def _on_script(sequence: _Sequence, node: Node | None) -> bool:
    """True when the node's path is the beginning of the target's next tokens."""
    length, script = len(sequence.tokens), sequence.script.tokens
    while node is not None:
        at = length + node.depth - 1
        if at >= len(script) or script[at] != node.token:
            return False
        node = node.parent
    return True
