"""One session of the draft service: its candidate tree, what was sent, and what it waits for.

Pure: no clock, no I/O, no model. A node is *expanded* when its children have been proposed; the
*frontier* holds the unexpanded nodes whose parent is expanded. All candidates that were ever proposed
below a live node are remembered with their rank, sent or not: calibration learns from them, and those that
were too unlikely to send become nodes when a commit makes them likely enough.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.calibration import TaskCalibration
from draft_service.drafters.base import Candidate, CandidateSource, Proposal
from draft_service.outbound import Outbound
from outrider.protocol.messages import FinishReason, OpenDraft, TokenBlock, Verdict
from outrider.speculation.candidate_tree import CandidateTree, Node, Rerooted
from outrider.speculation.decayed import Decayed

FULL_PRICE_SESSIONS = 4
"""Sessions in a step from which on a node must bring its whole price: the target then has room for few nodes,
and others cost it time. With fewer sessions a node must bring the price times the square of their share of
this number: the tree serves later rounds too, in which an unlikely node may have become likely. Measured, see
docs/history/performance.md."""
MIN_REACH = 0.005
"""Smallest reach of nodes that are sent or expanded, even where they cost the target nothing."""
ROOT = -1
"""The key of the last committed token where keys are node ids."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of one session."""

    max_nodes: int
    max_depth: int
    context_length: int
    """The drafter can compute positions below this."""
    end_tokens: frozenset[int]
    """Tokens that nothing follows: verifying them brings no token that their parent does not bring."""
    expands: bool = True
    """False if the drafter has nothing to compute."""
    renews: bool = False
    """True when every commit gives the drafter new features of the root, which it then expands again."""


@dataclass(slots=True)
class _Proposed:
    """What was proposed below one node."""

    expanded: bool = False
    ranked: list[Candidate] = field(default_factory=list)
    winners: tuple[int, ...] = ()


class DraftSession:
    """What the engine knows about one session.

    Invariants: the parent of an expanded node is expanded; every frontier node is live, unexpanded and
    has an expanded parent.
    """

    def __init__(
        self, key: int, request: OpenDraft, limits: DraftLimits, calibration: TaskCalibration
    ) -> None:
        self.key = key
        self.request = request
        self.pipelined = request.pipelined
        """True while it drafts beside the target; otherwise a ready block stops it until the next verdict."""
        self.step = request.first_step
        self.tree = CandidateTree(list(request.token_ids), limits.max_nodes)
        self.calibration = calibration
        self.wanted = True
        """False while the verify side wants no draft, and the session pauses."""
        self.outbound = Outbound(request.first_node_id)
        self.starved = True
        """True if the last commit left the verify side without candidates."""
        self.finished = False
        self.suspended = False
        """True while its memory does not fit, and nothing is expanded."""
        self.waiting = False
        """True while the features of the last committed token are missing, and nothing is expanded."""
        self._limits = limits
        self._min_reach = MIN_REACH
        self._round_tokens = Decayed()
        self._next_step = 0.0
        """Seconds from a verdict to the step that its blocks should reach."""
        self._end = request.sampling.end_length(request.prompt_length)
        self._proposed: defaultdict[int, _Proposed] = defaultdict(_Proposed)
        """What was proposed below each node, by id."""
        self._frontier: list[tuple[float, int, Node]] = []

    @property
    def growing(self) -> bool:
        """False when nothing may be expanded before the next verdict."""
        stopped = self.finished or self.suspended or self.waiting or not self.wanted
        return not (stopped or (self.outbound.ready_sent and not self.pipelined))

    @property
    def root_pending(self) -> bool:
        """True while the children of the last committed token have not been computed."""
        return self._limits.expands and not self._is_expanded(ROOT)

    @property
    def rate(self) -> float:
        """Tokens per second that the session commits; 0 before the first verdict."""
        return (self._round_tokens.value or 0.0) / self._next_step if self._next_step else 0.0

    @property
    def best_reach(self) -> float:
        """Reach of the best unexpanded node; 0 if there is none."""
        if not self.growing or len(self.tree) >= self._limits.max_nodes:
            return 0.0
        if self.root_pending:
            return 1.0 if self._computable(0) else 0.0
        return -self._frontier[0][0] if self._frontier else 0.0

    def gain(self, count: int) -> float:
        """Return the sum of the reach of the `count` best unexpanded nodes."""
        if self.root_pending or count == 1:
            return self.best_reach
        return -sum(entry[0] for entry in heapq.nsmallest(count, self._frontier))

    def take(self) -> Node | None:
        """Remove and return the best unexpanded node, None for the root; it then counts as expanded."""
        node = None if self.root_pending else heapq.heappop(self._frontier)[2]
        self._at(node).expanded = True
        for child in (self.tree.children if node is None else node.children).values():
            self._add_to_frontier(child)
        return node

    def put_back(self, node: Node | None) -> None:
        """Undo `take`: neither the node nor anything below it was expanded."""
        self._at(node).expanded = False
        self._rebuild_frontier()

    def grow(self, node: Node | None, proposal: Proposal) -> None:
        """Add the candidates below `node` (None: the root) that are likely enough."""
        self._at(node).winners = proposal.winners or self._at(node).winners
        places: list[Node | None] = []
        for candidate in proposal.candidates:
            nested = candidate.parent >= 0
            parent = places[candidate.parent] if nested else node
            lost = nested and parent is None
            places.append(None if lost else self._propose(parent, candidate))

    def commit(self, verdict: Verdict, now: float) -> Rerooted:
        """Re-root below the committed tokens and learn from them."""
        self._round_tokens.observe(len(verdict.tokens))
        self._obey(verdict, now)
        self.step = verdict.step
        self._learn(verdict.tokens)
        rerooted = self.tree.commit(list(verdict.tokens))
        self._rekey(rerooted, len(verdict.tokens))
        self._rebuild_frontier()
        self.outbound.drop({node.id for node in rerooted.dropped})
        self.starved = not any(node.id < self.outbound.first_id for node in self.tree.nodes())
        self.finished = verdict.finish_reason is not FinishReason.NONE
        self._revive()
        return rerooted

    def _obey(self, verdict: Verdict, now: float) -> None:
        """Adopt what the verify side asks for: drafts or none, the price of a node, when to send."""
        self.outbound.verdict(verdict, now)
        self.pipelined = self.request.pipelined and not verdict.take_turns
        self.wanted = verdict.draft_wanted
        share = min(verdict.batch_size / FULL_PRICE_SESSIONS, 1.0) ** 2
        self._min_reach = max(verdict.node_price * share, MIN_REACH)
        self._next_step = verdict.next_step_micros * 1e-6

    def forget_expansions(self) -> None:
        """Count every node as unexpanded, because the drafter's memory of the session is gone."""
        self._proposed.clear()
        self._rebuild_frontier()

    def next_block(self, ready: bool, now: float) -> TokenBlock:
        """Return the unsent nodes as a block; see `Outbound.take`."""
        return self.outbound.take(ready, self.tree.committed_length, now)

    def _propose(self, parent: Node | None, candidate: Candidate) -> Node | None:
        ranked = self._at(parent).ranked
        if candidate.source is CandidateSource.MODEL or not _recalled(candidate, ranked):
            ranked.append(candidate)
        return self._admit(parent, candidate)

    def _admit(self, parent: Node | None, candidate: Candidate) -> Node | None:
        """Return the node of a candidate, creating it if needed; None if the candidate is too unlikely or not
        allowed."""
        siblings = self.tree.children if parent is None else parent.children
        known = siblings.get(candidate.token)
        if known is not None:
            return known
        acceptance = self.calibration.estimate(candidate)
        reach, depth = (parent.reach, parent.depth) if parent is not None else (1.0, 0)
        if acceptance * reach < self._min_reach or not self._allowed(depth + 1):
            return None
        if candidate.token in self._limits.end_tokens:
            return None
        node = self.tree.add_child(self.outbound.next_id, parent, candidate.token, acceptance)
        if node is None:
            return None
        self.outbound.add(node, parent.id if parent is not None else -self.tree.committed_length)
        self._add_to_frontier(node)
        return node

    def _allowed(self, depth: int) -> bool:
        """True if a node of this depth could bring a token after it."""
        return depth <= self._limits.max_depth and self.tree.committed_length + depth < self._end

    def _computable(self, depth: int) -> bool:
        """True if a node of this depth can be expanded and its children would be allowed."""
        position = self.tree.committed_length + depth - 1
        return position < self._limits.context_length and self._allowed(depth + 1)

    def _add_to_frontier(self, node: Node) -> None:
        """Put a node on the frontier if it can be expanded."""
        if (
            self._limits.expands
            and node.reach >= self._min_reach
            and self._is_expanded(_key(node.parent))
            and not self._is_expanded(node.id)
            and self._computable(node.depth)
        ):
            heapq.heappush(self._frontier, (-node.reach, node.id, node))

    def _at(self, node: Node | None) -> _Proposed:
        return self._proposed[_key(node)]

    def _is_expanded(self, key: int) -> bool:
        proposed = self._proposed.get(key)
        return proposed is not None and proposed.expanded

    def _rebuild_frontier(self) -> None:
        self._frontier = []
        for node in self.tree.nodes():
            self._add_to_frontier(node)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Observe, along the committed tokens, which of the ranked candidates was taken."""
        key, level = ROOT, self.tree.children
        for token in tokens:
            proposed = self._proposed.get(key)
            if proposed is not None:
                self.calibration.observe(proposed.ranked, token)
                self.calibration.observe_winners(proposed.winners, token)
            node = level.get(token)
            if node is None:
                return
            key, level = node.id, node.children

    def _rekey(self, rerooted: Rerooted, count: int) -> None:
        """Move what was proposed below the new root to ROOT; forget what was below dropped nodes."""
        walked = rerooted.walked
        kept = len(walked) == count and not self._limits.renews
        proposed = self._proposed.get(walked[-1].id) if kept else None
        for node in (*walked, *rerooted.dropped):
            self._proposed.pop(node.id, None)
        self._proposed[ROOT] = proposed or _Proposed()

    def _revive(self) -> None:
        """Turn remembered candidates that have become likely enough into nodes."""
        for node in (None, *list(self.tree.nodes())):
            proposed = self._proposed.get(_key(node))
            for candidate in proposed.ranked if proposed is not None else ():
                self._admit(node, candidate)


def _recalled(candidate: Candidate, ranked: Sequence[Candidate]) -> bool:
    """True if the same source has proposed the token here before: some sources do so at every commit."""
    return any(earlier.token == candidate.token and earlier.source is candidate.source for earlier in ranked)


def _key(node: Node | None) -> int:
    return ROOT if node is None else node.id
