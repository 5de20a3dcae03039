"""Which sessions, which prefill chunks and which nodes go into the next step. Pure: the time is passed in.

A step takes along every session that may go: what a step costs is mostly not the tokens in it, so the last
committed token's row brings one more token at next to no cost. Sequential sessions stay out until their
block has come. Nodes are added over all sessions, most likely first, up to the number at which the expected
committed tokens per second of the step are highest. T(n) is a step function of n, so the best number is
looked for over all prefixes and not only up to the first fall. That one rule gives long blocks to few
sessions, short ones to many, and none where they do not pay.

The same rate decides whether to wait: a step is held while blocks are due so soon that they bring more
tokens, less the price of their nodes, than such a step makes until then. A single session thus waits after
a miss, and a full batch does not wait at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.speculation.candidate_tree import Node
from verify_service.session import VerifySession
from verify_service.speculation.cost_model import CostModel

PREFILL_SHARE = 0.5
"""Share of a step that nodes leave to waiting prefill."""
PREFILL_PACE = 0.95
"""Of the best rate in tokens per second, at which prompts are computed while sessions decode beside them:
larger chunks bring a prompt little and let the others wait longer (docs/history/performance.md)."""
MAX_PROMPT_ROWS = 64
"""Rows of a step that give log probabilities of prompts: each is as wide as the vocabulary."""
MIN_STRETCH = 4
"""Over how many more tokens, at least, T's slope is taken: it rises in steps."""


@dataclass(slots=True)
class Work:
    """What one session does in a step: its next `chain` uncomputed tokens, then `nodes` below them.

    `completes`: the chain ends with the last committed token, so the step commits new ones.
    """

    session: VerifySession
    chain: int
    completes: bool
    nodes: list[Node] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens in the forward."""
        return self.chain + len(self.nodes)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step is expected to make."""

    rate: float
    """Committed tokens per second."""
    marginal_price: float
    """Expected tokens that one more node would have to bring to be worth its time."""
    price: float
    """What those of the step cost on average, in tokens; without any, the marginal price."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step; without work, `until` is when to look again (None: nobody waits)."""

    works: list[Work]
    until: float | None = None
    price: float = 0.0
    """What a node of this step costs, in tokens."""


def plan_step(sessions: Sequence[VerifySession], now: float, cost: CostModel, max_tokens: int) -> StepPlan:
    """Decide the next step, of at most `max_tokens` tokens.

    `sessions` come in the order of their seniority; the one that stepped longest ago goes first where
    there is not room for all.
    """
    runnable = [session for session in sessions if session.runnable]
    going = [session for session in runnable if session.may_start(now)]
    if not going:
        return StepPlan([], min((session.deadline for session in runnable), default=None))
    prefills = [session for session in going if session.uncomputed > 1]
    decodes = sorted((s for s in going if s.uncomputed == 1), key=_last_verdict)[:max_tokens]
    works = [Work(session, 1, True) for session in decodes]
    room = max_tokens - len(works)
    budget = add_nodes(works, cost, int(room * PREFILL_SHARE) if prefills else room)
    wait = None if prefills else hold(decodes, now, budget)
    if wait is not None:
        return StepPlan([], now + wait)
    room -= sum(len(work.nodes) for work in works)
    if works and prefills:
        room = min(room, chunk_length(cost))
    return StepPlan(works + list(_chunks(prefills, room)), price=budget.price)


def chunk_length(cost: CostModel) -> int:
    """How many prompt tokens a step takes along where sessions decode in it: the fewest that a step of their
    own would compute at nearly the best rate.
    """
    rates = {tokens: tokens / cost.seconds(tokens) for tokens in cost.points}
    enough = PREFILL_PACE * max(rates.values())
    return next(tokens for tokens, rate in rates.items() if rate >= enough)


def hold(sessions: Sequence[VerifySession], now: float, budget: Budget) -> float | None:
    """Seconds to wait for blocks that are due before a step of the given budget; None: start."""
    dues = [(due, session) for session in sessions if (due := session.block_due(now)) is not None]
    gains = 0.0
    for due, session in sorted(dues, key=_due):
        gains += session.gain(budget.marginal_price)
        if gains > budget.rate * due:
            return due
    return None


def add_nodes(works: Sequence[Work], cost: CostModel, room: int) -> Budget:
    """Give the works the nodes, at most `room`, with which the step commits most tokens per second.

    T counts the works and their nodes; prompts fill what is left of the step afterwards.
    """
    if not works:
        return Budget(0.0, 0.0, 0.0)
    picks = [(each.worth, work, each.node) for work in works for each in work.session.eligible()]
    picks.sort(key=_worth, reverse=True)  # stable: parents stay before their children
    base, expected = len(works), float(len(works))
    best_rate = expected / cost.seconds(base)
    best = 0
    for count, (worth, _, _) in enumerate(picks[:room], 1):
        expected += worth
        rate = expected / cost.seconds(base + count)
        if rate > best_rate:
            best, best_rate = count, rate
    for _, work, node in picks[:best]:
        work.nodes.append(node)
    marginal = best_rate * cost.slope(base + best, max(base, MIN_STRETCH))
    return Budget(best_rate, marginal, best_rate * cost.slope(base, best) if best else marginal)


def _chunks(prefills: Sequence[VerifySession], room: int) -> Iterator[Work]:
    """Half of the room for the shortest prompts, which need not wait for long ones; the rest in order."""
    chunks = dict.fromkeys((session.id for session in prefills), 0)
    rows = MAX_PROMPT_ROWS
    for order, left_over in ((sorted(prefills, key=_uncomputed), room // 2), (prefills, 0)):
        for session in order:
            chunk = min(session.uncomputed - chunks[session.id], room - left_over)
            if session.prompt_logprobs_left:
                chunk = min(chunk, rows)
                rows -= chunk
            chunks[session.id] += chunk
            room -= chunk
    for session in prefills:
        if chunk := chunks[session.id]:
            yield Work(session, chunk, completes=chunk == session.uncomputed)


def _uncomputed(session: VerifySession) -> int:
    return session.uncomputed


def _worth(pick: tuple[float, Work, Node]) -> float:
    return pick[0]


def _due(pair: tuple[float, VerifySession]) -> float:
    return pair[0]


def _last_verdict(session: VerifySession) -> float:
    return session.last_verdict
