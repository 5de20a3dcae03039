"""Estimates how probable the nodes of a session's drafts are, with one draft or several.

Every draft calibrates its own estimates, and `Trust` corrects a draft that does it badly. With several
drafts, the best corrected estimate of a node and the number of drafts that proposed it select a cell of an
acceptance model: a node that two drafts propose is accepted more often than one that a single draft proposes.
The committed tokens teach how much more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.speculation.acceptance import AcceptanceModel, bucket, confidence_priors
from outrider.speculation.candidate_tree import CandidateTree, Node
from verify_service.speculation.origins import from_draft

MAX_SILENCE = 4
"""Verdicts in a row without a block after which a draft counts as not at work."""
TRUST_DECAY = 0.95
"""Share of the counts that remains at each further position."""
TRUST_PRIOR = 4.0
"""Positions at which a new draft is assumed to have been right."""


class Trust:
    """How far a draft's estimates can be believed: the ratio of right proposals for the next position to the
    predicted number of right ones, at most 1.

    It guards the target's budget against a draft that calibrates badly, or lies. Every committed token shows
    whether a node proposed for its position was right, verified or not. So a draft that improves is trusted
    again even while none of its nodes are verified.
    """

    def __init__(self) -> None:
        self._predicted = 0.0
        self._right = 0.0

    @property
    def factor(self) -> float:
        """The factor, at most 1, for the acceptance estimates of the draft's nodes."""
        return min((self._right + TRUST_PRIOR) / (self._predicted + TRUST_PRIOR), 1.0)

    def observe(self, predicted: float, right: bool) -> None:
        """Note one position, at which the proposals were expected to be right with probability `predicted`;
        `right`: one of them was."""
        self._predicted = TRUST_DECAY * self._predicted + min(predicted, 1.0)
        self._right = TRUST_DECAY * self._right + right


class Agreement:
    """Learns how often nodes of several drafts are accepted; all sessions of a replica share it."""

    def __init__(self) -> None:
        self._model = AcceptanceModel(confidence_priors())

    def estimate(self, best: float, drafts: int, greedy: bool, task: str) -> float:
        """Return the acceptance of a node that `drafts` drafts proposed, with the best corrected estimate
        `best`."""
        return self._model.estimate(bucket(best, greedy), drafts - 1, task)

    def observe(self, best: float, drafts: int, greedy: bool, task: str, taken: bool) -> None:
        """Note that the target's walk came to the parent of such a node; `taken`: it took the node, not
        another token."""
        self._model.observe(bucket(best, greedy), drafts - 1, taken, task)


class Belief:
    """One session's trust in its drafts, and the acceptance that it expects of their nodes."""

    def __init__(self, agreement: Agreement, greedy: bool, task: str) -> None:
        self._agreement, self._greedy, self._task = agreement, greedy, task
        self._trusts: dict[int, Trust] = {}
        self.drafts: dict[int, int] = {}
        """The drafts at work: a draft's number -> the step before which it last sent nodes."""

    @property
    def several(self) -> bool:
        """True when more than one draft is at work: then `Agreement` estimates their nodes."""
        return len(self.drafts) > 1

    def hear(self, draft: int, step: int) -> None:
        """Note that a draft sent nodes. Drafts that sent none for MAX_SILENCE steps count as not at work."""
        self.drafts[draft] = step
        if self.several:
            self.drafts = {each: at for each, at in self.drafts.items() if step - at < MAX_SILENCE}

    def estimator(self) -> Callable[[Node], float]:
        """Return a function that estimates how probably the target takes a node when its walk comes to the
        parent."""
        if self.several:
            return self._merged
        factor = self._factor(next(iter(self.drafts), 0))
        return lambda node: node.acceptance * factor if from_draft(node) else node.acceptance

    def _merged(self, node: Node) -> float:
        if node.claims is None and not from_draft(node):
            return node.acceptance  # the lookup or the grammar has calibrated it
        estimates = node.estimates
        return self._agreement.estimate(self._best(estimates), len(estimates), self._greedy, self._task)

    def learn(self, tree: CandidateTree, tokens: Sequence[int]) -> None:
        """Learn from what drafts proposed along the walk, before `tokens` are committed to the tree."""
        self._judge(tree.children, tokens[0])
        level = tree.children
        for token in tokens if self.several else ():
            for node in level.values():
                if node.claims is not None or from_draft(node):
                    best, drafts = self._best(node.estimates), len(node.estimates)
                    self._agreement.observe(best, drafts, self._greedy, self._task, node.token == token)
            if token not in level:
                return
            level = level[token].children

    def _judge(self, children: dict[int, Node], token: int) -> None:
        """Compare each draft's proposals for the next position with the token that the target chose."""
        predicted: dict[int, float] = {}
        right: set[int] = set()
        for node in children.values():
            if from_draft(node):
                for draft, acceptance in node.estimates.items():
                    predicted[draft] = predicted.get(draft, 0.0) + acceptance
                    if node.token == token:
                        right.add(draft)
        for draft, expected in predicted.items():
            self._trusts.setdefault(draft, Trust()).observe(expected, draft in right)

    def _best(self, estimates: dict[int, float]) -> float:
        return max(acceptance * self._factor(draft) for draft, acceptance in estimates.items())

    def _factor(self, draft: int) -> float:
        trust = self._trusts.get(draft)
        return 1.0 if trust is None else trust.factor
