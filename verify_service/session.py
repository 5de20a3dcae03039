"""One session of the verify service: what is committed, what is proposed, when it may step.

Pure: no clock, no I/O, no model. Of the committed tokens, [0, kv.length) are computed and [kv.length,
committed_length) are not: at first the whole prompt, later only the last token, whose logits choose the next
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.kv.pages import SequenceKv
from outrider.grammar.matcher import Matcher
from outrider.protocol.allowance import MAX_TREE_NODES
from outrider.protocol.messages import FinishReason, OpenVerify, TokenBlock, VerifyPolicy
from outrider.rpc.queues import Outbox
from outrider.sampling.chooser import SamplingRow
from outrider.sampling.history import History
from outrider.speculation.candidate_tree import CandidateTree, Node, tokens_to
from verify_service.candidates import Candidates, Eligible
from verify_service.mailbox import Event
from verify_service.speculation.drafting import Traffic
from verify_service.speculation.pace import Pace
from verify_service.speculation.patience import MAX_PATIENCE, Patience
from verify_service.speculation.several_drafts import MAX_SILENCE, Agreement, Belief

MAX_UNANSWERED = 16
"""Most verdicts for which the draft's answer is still timed; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """Bounds that the replica sets for every session."""

    max_nodes: int
    context_length: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    max_patience: float = MAX_PATIENCE
    """Longest wait for candidates when waiting pays, in seconds."""
    hidden_size: int = 1
    """Width of the target's layers."""
    max_tree_nodes: int = MAX_TREE_NODES


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step committed."""

    tokens: list[int]
    finish: FinishReason
    hit: bool


class VerifySession:
    """What the engine knows about one session.

    `committed` are all tokens so far, of which `opening.prompt_length` are prompt. `kv` is None while the
    session is paused for lack of pages.
    """

    def __init__(
        self,
        id: int,
        opening: OpenVerify,
        committed: Sequence[int],
        limits: VerifyLimits,
        outbox: Outbox[Event],
        now: float,
        patience: Patience,
        matcher: Matcher | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.id = id
        self.opening = opening
        self.outbox = outbox
        self.limits = limits
        self.tree = CandidateTree(list(committed), limits.max_tree_nodes)
        self.kv: SequenceKv | None = None
        self.step = opening.first_step
        self.finished = False
        self.max_nodes = min(opening.max_nodes or limits.max_nodes, limits.max_nodes)
        self.end_length = end_length(opening, limits.context_length)
        self.history = History(committed[: opening.prompt_length], committed[opening.prompt_length :])
        belief = Belief(agreement or Agreement(), opening.sampling.greedy, opening.task)
        self.candidates = Candidates(self.tree, belief, limits.vocabulary_size, matcher)
        self._matcher = matcher
        """The position of the text in its grammar; None: it has no grammar."""
        self.patience = patience
        self._pace = Pace(opening.seconds_per_token)
        self.last_verdict = now
        """When the last verdict was published; at first, when the session was opened."""
        self.idle_before = 0.0
        """The engine's idle seconds up to the last verdict."""
        self.deadline = now
        """The time until which a sequential session waits for a ready block."""
        self.ready = False
        """True after a ready block from a draft that knew the last verdict."""
        self.takes_turns = False
        """True if its draft should stop at a ready block, because the target then uses the draft's cores."""
        self.draft_wanted = True
        """The controller's decision; verdicts carry it to the orchestrator."""
        self.without_candidates = False
        """True after a step with candidates gave NaN, which one of them may have caused: the next step has
        none."""
        self.features_sent = 0
        """The position before which features of tokens were sent or are not wanted."""
        self._next_prompt_logprob = max(opening.first_prompt_logprob, 1)
        """The first position of the prompt whose log probability is wanted and not known yet."""
        self._silence = MAX_SILENCE
        """Verdicts since the last block."""
        self._unanswered: dict[int, float] = {}
        """Committed length -> when the verdict that reached it was published, until the draft answers it."""
        self._stops = opening.sampling.end_tokens(limits.eos_token_ids)

    @property
    def policy(self) -> VerifyPolicy:
        """The policy that says when the target may run ahead of the draft."""
        return self.opening.policy

    @property
    def traffic(self) -> Traffic | None:
        """The kind of traffic that the controller decides about drafts for; None: it decides nothing for this
        session."""
        if self.policy is not VerifyPolicy.PIPELINED:
            return None
        return self.opening.task, not self.opening.sampling.greedy

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers that a draft reads; none while no draft is wanted."""
        return self.opening.feature_layers if self.draft_wanted else ()

    @property
    def has_draft(self) -> bool:
        """True while a draft answers verdicts. A draft stops with the verdict which says that it is not
        wanted."""
        return self.draft_wanted and self._silence < MAX_SILENCE

    @property
    def prompt_logprobs_left(self) -> bool:
        """True if log probabilities of the prompt are wanted and not all known yet."""
        wanted = self.opening.sampling.prompt_logprobs is not None
        return wanted and self._next_prompt_logprob < self.opening.prompt_length

    @property
    def reusable(self) -> int | None:
        """Most tokens that may be taken from the page cache; None: all. The rest must be computed, because
        the row of a prompt's token yields the log probability of the next token."""
        return self._next_prompt_logprob - 1 if self.prompt_logprobs_left else None

    def prompt_rows(self, chain: int) -> range:
        """Return those of the next `chain` tokens whose rows yield wanted log probabilities of the prompt."""
        if not self.prompt_logprobs_left or self.kv is None:
            return range(0)
        start = self.kv.length
        first = max(self._next_prompt_logprob - 1 - start, 0)
        return range(first, max(min(chain, self.opening.prompt_length - 1 - start), first))

    def note_prompt_logprobs(self, rows: range) -> None:
        """Note that the log probabilities of these rows are known."""
        assert self.kv is not None
        self._next_prompt_logprob = self.kv.length + rows.stop + 1

    @property
    def uncomputed(self) -> int:
        """Number of committed tokens without keys and values; the last committed token is always one of
        them."""
        return self.tree.committed_length - (self.kv.length if self.kv is not None else 0)

    @property
    def runnable(self) -> bool:
        """False while nothing may be computed: the session is finished or paused, or too many verdicts are
        unread."""
        return not (self.finished or self.kv is None or self.outbox.full)

    def may_start(self, now: float) -> bool:
        """False while a sequential session waits for its block; prefill never waits."""
        waits = self.policy is VerifyPolicy.SEQUENTIAL and not self.ready and now < self.deadline
        return not waits or self.uncomputed > 1

    def block_due(self, now: float) -> float | None:
        """Return the seconds until a ready block should come; None if it is there or none is expected.

        Nothing is expected before a draft's first answer, because it computes the prompt first.
        """
        waits = self.has_draft and self.policy is VerifyPolicy.PIPELINED
        if self.ready or self.without_candidates or not waits:
            return None
        return self.patience.due(now - self.last_verdict)

    def weight(self, now: float) -> float:
        """Return how many tokens of other sessions one of its tokens is worth: more while it is behind its
        pace."""
        return self._pace.weight(now, self.tree.committed_length)

    def gain(self, price: float) -> float:
        """Return the tokens, minus the price of nodes, that a complete tree would bring in addition to the
        present nodes."""
        return self.patience.gain([each.probability for each in self.eligible()], price)

    def eligible(self) -> list[Eligible]:
        """Return the nodes that may be verified, most likely first, parents before children, at most
        `max_nodes`."""
        if self.without_candidates:
            return []
        # A node for the very last token need not be verified: its parent's row chooses that token.
        max_depth = self.end_length - self.tree.committed_length - 1
        return self.candidates.eligible(max_depth, self.max_nodes)

    def propose(self, block: TokenBlock, arrived: float) -> int:
        """Add a block's nodes; return how many had no place."""
        if self.finished or self.policy is VerifyPolicy.OFF:
            return len(block)
        self._silence = 0
        added = self.candidates.add(block, self.step)
        current = block.base_length >= self.tree.committed_length
        if added.nodes or (block.ready and current):
            self._answered(block.base_length, arrived)
        if block.ready and (added.nodes or added.known or current):
            self.patience.completed([each.probability for each in self.eligible()])
        self.ready = self.ready or (block.ready and current)
        return added.stale

    def row(self, node: Node | None) -> SamplingRow:
        """Return what is needed to choose the token after `node`, or after the committed tokens if it is
        None."""
        position = self.tree.committed_length + (node.depth if node is not None else 0)
        params, history = self.opening.sampling, self.history
        generated = position - self.opening.prompt_length
        if not (params.penalised or self._matcher):
            return SamplingRow(params, position, generated, history)
        path = tokens_to(node)
        mask = None if self._matcher is None else self._matcher.mask(path)
        assert mask is not None or self._matcher is None, "no row is computed where the grammar has none"
        extended = history.extended(path) if node is not None and params.penalised else history
        return SamplingRow(params, position, generated, extended, mask)

    def settle(self) -> str:
        """Return, after a commit, why the grammar allows no next token; empty if all is well."""
        return "" if self._matcher is None or self.finished else self._matcher.settle()

    def commit(self, tokens: Sequence[int]) -> Committed:
        """Append the tokens that a step chose, cut where the generation ends."""
        kept, finish = self._cut(tokens)
        walked = self.candidates.commit(kept)
        self.history.append(kept)
        self.finished = finish is not FinishReason.NONE
        self.without_candidates = False
        hit = len(kept) == len(tokens) == len(walked)
        if self.has_draft:
            self.patience.stepped(hit)
        return Committed(kept, finish, hit)

    def published(self, now: float, idle: float, price: float = 0.0) -> None:
        """Note that a step's verdict left at `now`; the engine has been idle for `idle` seconds so far.

        `price` is the price of a node in the step, in tokens.
        """
        self.step += 1
        self._silence += 1
        self.last_verdict, self.idle_before = now, idle
        self.ready = False
        self._pace.observe(now, self.tree.committed_length)
        self._unanswered[self.tree.committed_length] = now
        if len(self._unanswered) > MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]
        if not self.finished:
            self.candidates.refill(price, forced=self.policy is not VerifyPolicy.OFF)
        if self.policy is VerifyPolicy.SEQUENTIAL:
            self.deadline = now + self.patience.sequential_wait()

    def started(self, now: float) -> None:
        """Note that a step with this session begins."""
        if self.tree.committed_length not in self._unanswered:
            return
        sequential = self.policy is VerifyPolicy.SEQUENTIAL
        if now >= self.deadline if sequential else self.patience.overdue(now - self.last_verdict):
            self.patience.ran_out()

    def release_pages(self) -> None:
        """Give all pages back; tokens and candidates stay."""
        if self.kv is not None:
            self.kv.release()
        self.kv = None

    def _answered(self, base_length: int, arrived: float) -> None:
        """Learn how long the draft took to answer the verdict that reached `base_length`."""
        published = self._unanswered.pop(base_length, None)
        if published is not None:
            self.patience.answered(arrived - published)

    def _cut(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason]:
        """The tokens up to the one that ends the generation, and why it ends."""
        room = self.end_length - self.tree.committed_length
        generated = self.tree.committed_length - self.opening.prompt_length
        first_stop = max(self.opening.sampling.min_tokens - generated, 0)
        for index, token in enumerate(tokens[:room]):
            complete = self._matcher is not None and self._matcher.advance(token)
            if complete or (index >= first_stop and token in self._stops):
                return list(tokens[: index + 1]), FinishReason.STOP
        finish = FinishReason.LENGTH if len(tokens) >= room else FinishReason.NONE
        return list(tokens[:room]), finish


def end_length(opening: OpenVerify, context_length: int) -> int:
    """Return the committed length at which a generation is over."""
    return int(min(context_length, opening.sampling.end_length(opening.prompt_length)))
