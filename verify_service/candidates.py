"""One session's candidates: their tree, the sources of nodes in this service, and how probable nodes are.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from outrider.grammar.matcher import Matcher
from outrider.protocol.messages import TokenBlock
from outrider.speculation.candidate_tree import Added, CandidateTree, Node, draft_of, tokens_to
from verify_service.speculation.forced_candidates import ForcedCandidates
from verify_service.speculation.lookup_candidates import LookupCandidates, PredictedCandidates
from verify_service.speculation.origins import from_draft
from verify_service.speculation.several_drafts import Belief

NO_PARENT = -(2**62)
"""Stands for a parent that does not exist."""


@dataclass(frozen=True, slots=True)
class Eligible:
    """A node that may be verified, and the probability that the target commits it.

    The probability is also the mean number of tokens that the node brings.
    """

    probability: float
    node: Node


class Candidates:
    """One tree of the nodes that drafts, lookup, prediction and grammar propose."""

    def __init__(
        self, tree: CandidateTree, belief: Belief, vocabulary_size: int, matcher: Matcher | None
    ) -> None:
        """`matcher` is the position of the text in its grammar; None: it has no grammar."""
        self.tree = tree
        self.lookup: LookupCandidates | None = None
        self.prediction: PredictedCandidates | None = None
        self._belief = belief
        self._vocabulary_size = vocabulary_size
        self._matcher = matcher
        self._forced = None if matcher is None else ForcedCandidates(matcher)
        self._eligible: list[Eligible] | None = None
        """The last result of `eligible`; None once candidates or committed tokens have changed."""

    def eligible(self, max_depth: int, max_nodes: int) -> list[Eligible]:
        """The nodes that may be verified, most likely first, parents before children."""
        if self._eligible is None:
            allows = None if self._matcher is None else self._allows
            found = _best_first(self.tree.children, max_depth, self._belief.estimator(), allows)
            self._eligible = list(islice(found, max_nodes))
        return self._eligible

    def add(self, block: TokenBlock, step: int) -> Added:
        """Add a draft's nodes, which came after `step` steps. Each of several drafts has its share of the
        tree."""
        if block.tokens:
            self._belief.hear(draft_of(block.first_id), step)
            self.tree.max_per_draft = self.tree.max_nodes // len(self._belief.drafts)
        self._eligible = None
        return self.tree.add(_inside(block, self._vocabulary_size))

    def commit(self, tokens: Sequence[int]) -> list[Node]:
        """Learn from committed tokens and re-root below them; return the nodes on their path."""
        self._eligible = None
        self._belief.learn(self.tree, tokens)
        for own in self._own:
            own.learn(self.tree, tokens)
        walked = self.tree.commit(list(tokens)).walked
        for own in self._own:
            own.extend(tokens)
        return walked

    def refill(self, price: float, forced: bool) -> None:
        """Propose nodes of this service below the last committed token, where they are worth the price of a
        node; with `forced`, also the tokens that the grammar forces."""
        self._eligible = None
        for own in self._own:
            own.propose(self.tree, price)
        if forced and self._forced is not None:
            self._forced.propose(self.tree)

    def needs_draft_for(self, node: Node) -> bool:
        """True when a draft proposed the node and no source in this service did."""
        own = any(own.found(node) for own in self._own)
        return from_draft(node) and not (own or (self._forced is not None and self._forced.found(node)))

    def predicted(self, node: Node) -> bool:
        """True when the caller's prediction proposes the node at present."""
        return self.prediction is not None and self.prediction.found(node)

    @property
    def _own(self) -> list[LookupCandidates]:
        """The sources of candidates in this service, the better informed first."""
        return [own for own in (self.prediction, self.lookup) if own is not None]

    def _allows(self, node: Node) -> bool:
        """False when the grammar allows no such node, or nothing after it. The parent's row then suffices."""
        assert self._matcher is not None
        return self._matcher.allows(tokens_to(node))


def _inside(block: TokenBlock, vocabulary_size: int) -> TokenBlock:
    """Return the block with no parent for tokens outside the vocabulary, so that they are dropped with all
    nodes below."""
    if max(block.tokens, default=0) < vocabulary_size:
        return block
    parents = tuple(
        parent if token < vocabulary_size else NO_PARENT
        for parent, token in zip(block.parents, block.tokens, strict=True)
    )
    return replace(block, parents=parents)


def _best_first(
    children: dict[int, Node],
    max_depth: int,
    belief: Callable[[Node], float],
    allows: Callable[[Node], bool] | None,
) -> Iterator[Eligible]:
    """Nodes in falling order of probability; a child is never more probable than its parent."""
    frontier: list[tuple[float, int, Node]] = []

    def open_below(nodes: dict[int, Node], probability: float) -> None:
        for node in nodes.values():
            believed = belief(node)
            if probability * believed > 0.0:
                heappush(frontier, (-probability * believed, node.id, node))

    if max_depth > 0:
        open_below(children, 1.0)
    while frontier:
        probability, _, node = heappop(frontier)
        if allows is not None and not allows(node):
            continue
        yield Eligible(-probability, node)
        if node.depth < max_depth:
            open_below(node.children, -probability)
